//! Running the program: to its end, or as a server with its log read line by line.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Longest wait for anything; only a broken program takes it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Flags that keep a server on this machine, on free ports.
pub(crate) const LOCAL: [&str; 5] = [
    "--http-address=127.0.0.1",
    "--http-port=0",
    "--grpc-address=127.0.0.1",
    "--grpc-port=0",
    "--metrics-port=0",
];

pub(crate) fn trireme() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trireme"));
    command.stdin(Stdio::null()).env("NO_COLOR", "1").env_remove("AIP_MODE");
    command
}

/// What a run printed and how it ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

/// Runs the program to its end.
pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Ended {
    trireme().args(arguments).output().expect("the program starts").into()
}

/// Runs the program to its end with a text as its standard input.
pub(crate) fn run_with_input(arguments: &[&str], input: &str) -> Ended {
    let mut child = trireme()
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("the program reads");
    child.wait_with_output().expect("the program ends").into()
}

/// A server that was started and has told its addresses. Killed when dropped.
pub(crate) struct Serving {
    child: Child,
    lines: Receiver<String>,
    log: Vec<String>,
    pub(crate) http: SocketAddr,
}

impl Serving {
    /// Serves a repository with further flags.
    pub(crate) fn repository(path: &Path, flags: &[&str]) -> Self {
        let mut command = trireme();
        command.arg("serve").arg("--model-repository").arg(path).args(LOCAL).args(flags);
        Self::start(command)
    }

    /// Starts a server and waits until it tells its addresses.
    pub(crate) fn start(command: Command) -> Self {
        let mut serving = Self::spawn(command);
        let line = serving.wait_for("Started HTTPService at ");
        serving.http = address_in(&line);
        serving.wait_for("Started Metrics Service at ");
        serving
    }

    /// Starts a server; its address is not known yet.
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child =
            command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("the program starts");
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let unknown = SocketAddr::from(([127, 0, 0, 1], 0));
        Self { child, lines, log: Vec::new(), http: unknown }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The first line from here on that holds a text.
    ///
    /// # Panics
    /// The server ends or stays silent first; the message holds its log.
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.log.push(line.clone());
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(_) => panic!("the server did not log '{text}':\n{}", self.log.join("\n")),
            }
        }
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.id().to_string()]).status();
        assert!(sent.expect("kill is installed").success());
    }

    /// Waits for the end: how it ended, how long that took, and the whole log.
    pub(crate) fn ended(&mut self) -> (ExitStatus, Duration, String) {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                break status;
            }
            assert!(started.elapsed() < PATIENCE, "the server does not end:\n{}", self.log.join("\n"));
            std::thread::sleep(Duration::from_millis(2));
        };
        let took = started.elapsed();
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.log.push(line);
        }
        (status, took, self.log.join("\n"))
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        self.ask("GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> (u16, String) {
        self.ask("POST", path, body)
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        receive(self.send(method, path, body))
    }

    /// Sends a request and leaves the answer to be read.
    pub(crate) fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.http).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(format!("{head}{body}").as_bytes()).expect("the server reads");
        stream
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Both fail where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Status and body of the answer to a request that was sent.
pub(crate) fn receive(mut stream: TcpStream) -> (u16, String) {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer in UTF-8");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: '{answer}'"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("no status: '{head}'")), body.to_owned())
}

fn address_in(line: &str) -> SocketAddr {
    let address = line.rsplit(' ').next().expect("a word").trim_end_matches('"');
    address.parse().unwrap_or_else(|_| panic!("no address at the end of '{line}'"))
}
