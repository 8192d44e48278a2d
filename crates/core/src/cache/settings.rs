//! What `--cache-config` comes to.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The cache of a server, and its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheSettings {
    /// In the memory of the server.
    Local {
        /// Bytes that answers and the bookkeeping for them may take together.
        size: usize,
    },
    /// In a Redis server, which several servers may share.
    Redis(Box<RedisSettings>),
}

/// Where the Redis server is, and for how long a request may wait for it.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisSettings {
    pub host: String,
    pub port: u16,
    pub user: Option<String>,
    pub password: Option<String>,
    pub db: i64,
    /// Limit on making a connection.
    pub connect_timeout: Duration,
    /// Limit on an answer of the Redis server; what takes longer counts as a failure of it.
    pub socket_timeout: Duration,
    /// Limit on the time that a lookup waits for a connection; what waits longer is a miss.
    pub wait_timeout: Duration,
    /// Connections, each with a thread.
    pub pool_size: usize,
    /// `None`: the connection is not encrypted.
    pub tls: Option<RedisTls>,
}

/// Files, all PEM, for an encrypted connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisTls {
    /// Certificates that the server's is checked against, or directories of such; none: those of the system.
    pub authorities: Vec<PathBuf>,
    /// This client's certificate and private key.
    pub client: Option<(PathBuf, PathBuf)>,
}

impl RedisSettings {
    /// The settings for a server without a password, with the default limits.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
            user: None,
            password: None,
            db: 0,
            connect_timeout: Duration::from_secs(1),
            socket_timeout: Duration::from_millis(250),
            wait_timeout: Duration::from_millis(100),
            pool_size: 2,
            tls: None,
        }
    }
}

impl fmt::Debug for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secret = self.password.as_ref().map(|_| "(not shown)");
        f.debug_struct("RedisSettings")
            .field("host", &self.host)
            .field("port", &self.port)
            .field("user", &self.user)
            .field("password", &secret)
            .field("db", &self.db)
            .field("connect_timeout", &self.connect_timeout)
            .field("socket_timeout", &self.socket_timeout)
            .field("wait_timeout", &self.wait_timeout)
            .field("pool_size", &self.pool_size)
            .field("tls", &self.tls)
            .finish()
    }
}
