//! Encrypted connections to Redis.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use redis::{Client, ClientTlsConfig, ConnectionInfo, RedisError, TlsCertificates};

use super::super::settings::RedisTls;

/// A client whose connections are encrypted. The files are read now.
///
/// # Errors
/// A file that cannot be read or holds no certificate.
pub(super) fn client(address: ConnectionInfo, tls: &RedisTls) -> Result<Client, RedisError> {
    // Only the first in a process counts, and any of them will do.
    let _already = rustls::crypto::ring::default_provider().install_default();
    let mut authorities = Vec::new();
    for place in &tls.authorities {
        for file in files(place)? {
            authorities.extend(fs::read(file)?);
            authorities.push(b'\n');
        }
    }
    let client_tls = match &tls.client {
        Some((certificate, key)) => {
            Some(ClientTlsConfig { client_cert: fs::read(certificate)?, client_key: fs::read(key)? })
        }
        None => None,
    };
    let root_cert = (!tls.authorities.is_empty()).then_some(authorities);
    if let Some(text) = &root_cert
        && !text.windows(BEGIN.len()).any(|window| window == BEGIN)
    {
        let message = "cacert and cacert_dir hold no certificate in PEM form";
        return Err(io::Error::new(io::ErrorKind::InvalidData, message).into());
    }
    Client::build_with_tls(address, TlsCertificates { client_tls, root_cert })
}

const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";

/// A file, or the files of a directory.
fn files(place: &Path) -> io::Result<Vec<PathBuf>> {
    if !fs::metadata(place)?.is_dir() {
        return Ok(vec![place.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(place)? {
        let path = entry?.path();
        if fs::metadata(&path)?.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use redis::{ConnectionAddr, IntoConnectionInfo as _};

    use super::*;

    fn refused(tls: &RedisTls) -> String {
        let address = ConnectionAddr::TcpTls { host: "h".into(), port: 1, insecure: false, tls_params: None };
        client(address.into_connection_info().expect("an address"), tls)
            .expect_err("must be refused")
            .to_string()
    }

    #[test]
    fn says_which_file_is_wrong() {
        let root = tempfile::tempdir().expect("a directory");
        let (absent, empty) = (root.path().join("absent.pem"), root.path().join("empty.pem"));
        fs::write(&empty, "").expect("can write");
        let with = |authorities: &[&Path], client: Option<&Path>| RedisTls {
            authorities: authorities.iter().map(|path| path.to_path_buf()).collect(),
            client: client.map(|path| (path.to_owned(), path.to_owned())),
        };
        for tls in [with(&[&absent], None), with(&[], Some(&absent))] {
            assert!(refused(&tls).contains("absent.pem"), "{}", refused(&tls));
        }
        for place in [&*empty, root.path()] {
            assert!(refused(&with(&[place], None)).contains("no certificate"));
        }
        assert!(!refused(&with(&[], Some(&empty))).is_empty());
    }
}
