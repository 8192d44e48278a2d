//! Opening the ports. A port that cannot be opened is explained: which flag chooses it, and who holds it.

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};

use socket2::{Domain, Protocol, Socket, Type};
use trireme_types::{Error, Result};

mod holder;

/// Connections that may wait to be accepted; Triton's value.
const BACKLOG: i32 = 1024;

/// Where a frontend listens.
#[derive(Clone, Debug)]
pub struct ListenOptions<'a> {
    /// An address or a host name, as `0.0.0.0`, `::` or `localhost`.
    pub address: &'a str,
    /// 0 lets the system choose.
    pub port: u16,
    /// Several processes may listen on the port (`SO_REUSEPORT`).
    pub reuse_port: bool,
    /// The flag that chooses the port, for messages: `--http-port`.
    pub port_flag: &'static str,
    /// The flag that chooses the address, for messages: `--http-address`.
    pub address_flag: &'static str,
}

/// Opens a port. The listener does not block, ready for an async runtime.
///
/// # Errors
/// `INVALID_ARG` when the address cannot be understood, `UNAVAILABLE` when the port cannot be opened.
pub fn listen(options: &ListenOptions<'_>) -> Result<TcpListener> {
    let address = resolve(options)?;
    open(address, options.reuse_port).map_err(|error| explain(options, address, &error))
}

fn resolve(options: &ListenOptions<'_>) -> Result<SocketAddr> {
    let bare = options.address.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, options.port));
    }
    let refused = |why: String| {
        Error::invalid_arg(format!(
            "cannot listen on '{}' ({}): {why}",
            options.address, options.address_flag
        ))
    };
    let mut found =
        (options.address, options.port).to_socket_addrs().map_err(|error| refused(error.to_string()))?;
    found.next().ok_or_else(|| refused("the name has no address".to_owned()))
}

fn open(address: SocketAddr, reuse_port: bool) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if reuse_port {
        socket.set_reuse_port(true)?;
    }
    socket.set_nonblocking(true)?;
    // Accepted connections inherit both: answers leave at once, and peers that vanished are noticed in time.
    socket.set_tcp_nodelay(true)?;
    socket.set_keepalive(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn explain(options: &ListenOptions<'_>, address: SocketAddr, error: &std::io::Error) -> Error {
    use std::io::ErrorKind;
    let flag = options.port_flag;
    let message = match error.kind() {
        ErrorKind::AddrInUse => {
            let who = match holder::of_port(address.port()) {
                Some(process) => format!("by {process}"),
                None => "by another process".to_owned(),
            };
            format!("Socket '{address}' already in use {who}; stop it, or choose another port with {flag}")
        }
        ErrorKind::PermissionDenied => format!(
            "not allowed to listen on '{address}': ports below 1024 need a privilege; choose another port with {flag}"
        ),
        ErrorKind::AddrNotAvailable => format!(
            "cannot listen on '{address}': this machine has no such address; choose another with {}",
            options.address_flag
        ),
        _ => format!("cannot listen on '{address}' ({flag}): {error}"),
    };
    Error::unavailable(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(address: &str, port: u16) -> ListenOptions<'_> {
        ListenOptions {
            address,
            port,
            reuse_port: false,
            port_flag: "--http-port",
            address_flag: "--http-address",
        }
    }

    #[test]
    fn opens_a_free_port_by_address_and_by_name() {
        for address in ["127.0.0.1", "localhost"] {
            let listener = listen(&options(address, 0)).expect("a free port");
            assert_ne!(listener.local_addr().expect("an address").port(), 0);
        }
    }

    #[test]
    fn a_taken_port_names_flag_and_holder() {
        let first = listen(&options("127.0.0.1", 0)).expect("a free port");
        let port = first.local_addr().expect("an address").port();
        let error = listen(&options("127.0.0.1", port)).expect_err("the port is taken");
        let message = error.message();
        assert!(message.starts_with(&format!("Socket '127.0.0.1:{port}' already in use by ")), "{message}");
        assert!(message.contains("--http-port"), "{message}");
        #[cfg(target_os = "linux")]
        assert!(message.contains(&format!("process {}", std::process::id())), "{message}");
    }

    #[test]
    fn shares_a_port_when_asked() {
        let shared = |port| ListenOptions { reuse_port: true, ..options("127.0.0.1", port) };
        let first = listen(&shared(0)).expect("a free port");
        let port = first.local_addr().expect("an address").port();
        listen(&shared(port)).expect("a shared port");
    }

    #[test]
    fn an_unknown_name_is_refused_with_its_flag() {
        let error = listen(&options("no such host", 0)).expect_err("no host");
        assert!(error.message().contains("--http-address"), "{error}");
    }
}
