//! A small HTTP/1.1 client: one connection a request, whole bodies, a limit on time and on the answer's size.

use std::future::Future;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::header::{HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

/// Port of a server that is named without one and without a scheme.
const DEFAULT_PORT: u16 = 8000;
/// Time for a connection to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer that is taken, in bytes.
const MAX_ANSWER_BYTES: usize = 2 << 30;

/// Where a server is and how it is asked.
#[derive(Debug)]
pub(super) struct Endpoint {
    url: String,
    host: String,
    port: u16,
    /// `Host` header.
    authority: HeaderValue,
    /// Path in front of `/v2`, without a slash at its end.
    base: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    timeout: Duration,
    runtime: Runtime,
}

/// An answer of the server, whatever its status.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// Length of the JSON in front of binary data.
    pub(super) json_length: Option<usize>,
    pub(super) body: Bytes,
}

/// Header that says where the JSON ends and binary data begins.
pub(super) const JSON_LENGTH: &str = "inference-header-content-length";

impl Endpoint {
    /// `headers` are `NAME:VALUE`.
    ///
    /// # Errors
    /// The URL or a header cannot be understood.
    pub(super) fn new(url: &str, headers: &[String], timeout: Duration) -> Result<Self> {
        let has_scheme = url.contains("://");
        let whole = if has_scheme { url.to_owned() } else { format!("http://{url}") };
        let expected = || format!("--url expects http://HOST:PORT, got '{url}'");
        let uri: Uri = whole.parse().with_context(expected)?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                bail!("--url {url}: TLS is not available in this client; use curl, or a plain port")
            }
            Some("grpc") => {
                bail!("--url {url}: this client speaks HTTP; give the HTTP port, which is 8000 by default")
            }
            _ => bail!(expected()),
        }
        let authority = uri.authority().with_context(expected)?;
        ensure!(
            !authority.as_str().contains('@'),
            "--url takes no user name; give a header with --header instead"
        );
        let default_port = if has_scheme { 80 } else { DEFAULT_PORT };
        let headers = headers.iter().map(|text| header(text)).collect::<Result<_>>()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start the network runtime")?;
        Ok(Self {
            url: whole.trim_end_matches('/').to_owned(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(default_port),
            authority: HeaderValue::from_str(authority.as_str()).with_context(expected)?,
            base: uri.path().trim_end_matches('/').to_owned(),
            headers,
            timeout,
            runtime,
        })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// # Errors
    /// The server cannot be reached or does not answer in time.
    pub(super) fn get(&self, path: &str) -> Result<Answer> {
        self.ask(Method::GET, path, &[], Bytes::new())
    }

    /// # Errors
    /// As [`Endpoint::get`].
    pub(super) fn post(&self, path: &str, headers: &[(&'static str, String)], body: Bytes) -> Result<Answer> {
        self.ask(Method::POST, path, headers, body)
    }

    fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &[(&'static str, String)],
        body: Bytes,
    ) -> Result<Answer> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        request = request.header(HOST, &self.authority);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let request = request.body(Full::new(body)).with_context(|| format!("cannot ask for '{path}'"))?;
        self.runtime.block_on(async {
            let seconds = self.timeout.as_secs();
            tokio::time::timeout(self.timeout, self.exchange(request)).await.with_context(|| {
                format!("{} did not answer within {seconds} seconds; --timeout waits longer", self.url)
            })?
        })
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Answer> {
        let connect = TcpStream::connect((self.host.as_str(), self.port));
        let stream = match tokio::time::timeout(CONNECT_TIMEOUT, connect).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => bail!("cannot reach {}: {error}; {START}", self.url),
            Err(_) => {
                bail!("cannot reach {} within {} seconds; {START}", self.url, CONNECT_TIMEOUT.as_secs())
            }
        };
        // The request is written at once; waiting to fill packets only delays it.
        let _best_effort = stream.set_nodelay(true);
        let lost = || {
            format!(
                "{} does not answer as an HTTP server; is this the HTTP port? By default HTTP is on 8000, gRPC on 8001 \
                 and metrics on 8002",
                self.url
            )
        };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.with_context(lost)?;
        let answer = async {
            let response = sender.send_request(request).await.with_context(lost)?;
            collect(response).await
        };
        drive(answer, connection).await
    }
}

const START: &str = "start a server with `trireme serve model.onnx` or `make serve`, or name the address of a running one with --url";

/// Waits for an answer while its connection is served.
async fn drive<T, E>(
    answer: impl Future<Output = Result<T>>,
    connection: impl Future<Output = Result<(), E>>,
) -> Result<T> {
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => return answer,
        // The server may close the connection behind its answer; an error reaches the answer as well.
        _ended = connection => {}
    }
    answer.await
}

async fn collect(response: Response<hyper::body::Incoming>) -> Result<Answer> {
    let status = response.status().as_u16();
    let length = response.headers().get(JSON_LENGTH).map(|value| {
        let number = value.to_str().ok().and_then(|text| text.parse().ok());
        number.with_context(|| format!("the server's header {JSON_LENGTH} is no length: {value:?}"))
    });
    let json_length = length.transpose()?;
    let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await.map_err(|error| {
        anyhow!(
            "the server's answer broke off: {error}; answers above {MAX_ANSWER_BYTES} bytes are not taken"
        )
    })?;
    Ok(Answer { status, json_length, body: body.to_bytes() })
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue)> {
    let parts = text.split_once(':').and_then(|(name, value)| {
        let name = HeaderName::from_bytes(name.trim().as_bytes()).ok()?;
        Some((name, HeaderValue::from_str(value.trim()).ok()?))
    });
    parts.with_context(|| format!("--header expects NAME:VALUE, got '{text}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(url: &str) -> Result<Endpoint> {
        Endpoint::new(url, &[], Duration::from_secs(5))
    }

    #[test]
    fn addresses_are_understood() {
        for (url, host, port, base) in [
            ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
            ("localhost", "localhost", 8000, ""),
            ("localhost:9000/", "localhost", 9000, ""),
            ("http://models.example/triton/", "models.example", 80, "/triton"),
            ("http://[::1]:8000", "::1", 8000, ""),
        ] {
            let endpoint = endpoint(url).expect(url);
            assert_eq!(
                (endpoint.host.as_str(), endpoint.port, endpoint.base.as_str()),
                (host, port, base),
                "{url}"
            );
        }
        for (url, reason) in [
            ("https://localhost", "TLS is not available"),
            ("grpc://localhost:8001", "this client speaks HTTP"),
            ("ftp://localhost", "--url expects http://HOST:PORT"),
            ("http://", "--url expects http://HOST:PORT"),
            ("http://a:b@localhost", "--header"),
        ] {
            let error = endpoint(url).expect_err(url).to_string();
            assert!(error.contains(reason), "{url}: {error}");
        }
        let bad = Endpoint::new("localhost", &["no colon".to_owned()], Duration::from_secs(1));
        assert!(bad.expect_err("no header").to_string().contains("--header expects NAME:VALUE"));
    }

    #[test]
    fn a_server_that_is_not_there_is_told_with_what_to_start() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        drop(listener);
        let error = endpoint(&address.to_string()).expect("valid").get("/v2").expect_err("nobody there");
        let error = format!("{error:#}");
        assert!(error.contains("cannot reach http://") && error.contains("trireme serve"), "{error}");
    }

    #[test]
    fn what_is_no_http_server_is_told() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let peer = std::thread::spawn(move || {
            use std::io::{Read as _, Write as _};
            let (mut stream, _) = listener.accept().expect("a client");
            let mut request = [0; 16];
            let count = stream.read(&mut request).expect("a request");
            assert!(count > 0);
            stream.write_all(b"\0\0\x06\x04\0\0\0\0\0").expect("can write");
        });
        let error = endpoint(&address).expect("valid").get("/v2").expect_err("not HTTP/1.1");
        peer.join().expect("no panic");
        assert!(format!("{error:#}").contains("is this the HTTP port?"), "{error:#}");
    }
}
