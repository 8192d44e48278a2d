//! The response cache that `--cache-config` and the older `--response-cache-byte-size` ask for.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use trireme_core::{CacheSettings, RedisSettings, RedisTls};

use super::value::{number, parse_boolean};
use crate::flags::Flags;

/// What a `--cache-config` looks like.
const FORM: &str = "--cache-config expects local,size=BYTES, or redis,host=HOST and redis,port=PORT";
/// Settings of the redis cache, for messages.
const REDIS_KEYS: &str =
    "host, port, user, password, db, connect_timeout, socket_timeout, pool_size and wait_timeout";
/// Variables that say who is to log in, where the flags do not.
const USER_VARIABLE: &str = "TRITONCACHE_REDIS_USERNAME";
const PASSWORD_VARIABLE: &str = "TRITONCACHE_REDIS_PASSWORD";

/// The cache of a server; none unless a flag asks for one.
pub(super) fn cache(flags: &Flags, warnings: &mut Vec<String>) -> Result<Option<CacheSettings>> {
    let texts = flags.all("cache-config");
    let old = number(flags, "response-cache-byte-size", 0, 0, i64::MAX)?;
    if flags.last("response-cache-byte-size").is_some() {
        if !texts.is_empty() {
            bail!(
                "--response-cache-byte-size and --cache-config cannot both be given; write only --cache-config \
                 local,size={old}"
            );
        }
        warnings.push(format!(
            "--response-cache-byte-size is deprecated; --cache-config local,size={old} means the same"
        ));
        if old > 0 {
            return Ok(Some(CacheSettings::Local { size: usize::try_from(old)? }));
        }
    }
    cache_settings(texts)
}

/// The cache that values of `--cache-config` describe together.
///
/// # Errors
/// They name two caches or one that is not known, or a setting is missing, unknown or cannot be read.
pub(crate) fn cache_settings(texts: &[String]) -> Result<Option<CacheSettings>> {
    parse(texts, |name| std::env::var(name).ok())
}

fn parse(texts: &[String], variable: impl Fn(&str) -> Option<String>) -> Result<Option<CacheSettings>> {
    let mut named: Option<&str> = None;
    let mut pairs = Vec::with_capacity(texts.len());
    for text in texts {
        let Some((name, pair)) = text.split_once(',') else {
            bail!("{FORM}, got '{text}'");
        };
        let Some((key, value)) = pair.split_once('=').filter(|(key, _)| !key.is_empty()) else {
            bail!("{FORM}, got '{text}'");
        };
        if let Some(earlier) = named.filter(|earlier| *earlier != name) {
            bail!("a server has one response cache, and --cache-config names two: '{earlier}' and '{name}'");
        }
        named = Some(name);
        pairs.push((key, value));
    }
    match named {
        None => Ok(None),
        Some("local") => local(&pairs).map(Some),
        Some("redis") => redis(&pairs, variable).map(Some),
        Some(other) => bail!("there is no response cache '{other}'; {FORM}"),
    }
}

fn local(pairs: &[(&str, &str)]) -> Result<CacheSettings> {
    let mut size = None;
    for (key, value) in pairs {
        match (*key, value.parse::<usize>()) {
            ("size", Ok(bytes)) if bytes > 0 => size = Some(bytes),
            ("size", _) => {
                bail!("--cache-config local,size expects a number of bytes above 0, got '{value}'")
            }
            _ => bail!("--cache-config local knows the setting size, got '{key}'"),
        }
    }
    match size {
        Some(size) => Ok(CacheSettings::Local { size }),
        None => {
            bail!("--cache-config local needs its size in bytes, as in --cache-config local,size=67108864")
        }
    }
}

fn redis(pairs: &[(&str, &str)], variable: impl Fn(&str) -> Option<String>) -> Result<CacheSettings> {
    let mut settings = RedisSettings::new("", 0);
    let mut encrypted = false;
    let mut files = TlsFiles::default();
    for (key, value) in pairs {
        let whole = |least: u64, most: u64| -> Result<u64> {
            match value.parse::<u64>() {
                Ok(number) if (least..=most).contains(&number) => Ok(number),
                _ => bail!(
                    "--cache-config redis,{key} expects a whole number from {least} to {most}, got '{value}'"
                ),
            }
        };
        // In Triton 0 waits for ever; here it stands for the limit that a request can bear.
        let limit = |default: Duration| -> Result<Duration> {
            let milliseconds = whole(0, 3_600_000)?;
            Ok(if milliseconds == 0 { default } else { Duration::from_millis(milliseconds) })
        };
        match *key {
            "host" => (*value).clone_into(&mut settings.host),
            "port" => settings.port = u16::try_from(whole(1, u16::MAX.into())?)?,
            "user" => settings.user = Some((*value).to_owned()),
            "password" => settings.password = Some((*value).to_owned()),
            "db" => settings.db = i64::try_from(whole(0, i32::MAX.unsigned_abs().into())?)?,
            "connect_timeout" => settings.connect_timeout = limit(settings.connect_timeout)?,
            "socket_timeout" => settings.socket_timeout = limit(settings.socket_timeout)?,
            "wait_timeout" => settings.wait_timeout = limit(settings.wait_timeout)?,
            "pool_size" => settings.pool_size = usize::try_from(whole(1, 64)?)?,
            "tls_enabled" => match parse_boolean(value) {
                Some(on) => encrypted = on,
                None => bail!("--cache-config redis,tls_enabled expects true or false, got '{value}'"),
            },
            "cert" => files.cert = Some(PathBuf::from(value)),
            "key" => files.key = Some(PathBuf::from(value)),
            "cacert" | "cacert_dir" => files.authorities.push(PathBuf::from(value)),
            "sni" => files.sni = Some((*value).to_owned()),
            _ => bail!("--cache-config redis knows the settings {REDIS_KEYS}, got '{key}'"),
        }
    }
    if settings.host.is_empty() || settings.port == 0 {
        bail!(
            "--cache-config redis needs host and port, as in --cache-config redis,host=localhost --cache-config \
             redis,port=6379"
        );
    }
    if encrypted {
        settings.tls = Some(files.tls(&settings.host)?);
    } else if files != TlsFiles::default() {
        bail!("--cache-config redis: cert, key, cacert, cacert_dir and sni need tls_enabled=true");
    }
    settings.user = settings.user.or_else(|| variable(USER_VARIABLE));
    settings.password = settings.password.or_else(|| variable(PASSWORD_VARIABLE));
    Ok(CacheSettings::Redis(Box::new(settings)))
}

/// What was said of the encryption.
#[derive(Default, PartialEq, Eq)]
struct TlsFiles {
    authorities: Vec<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    sni: Option<String>,
}

impl TlsFiles {
    fn tls(self, host: &str) -> Result<RedisTls> {
        if let Some(sni) = self.sni.filter(|sni| sni != host) {
            bail!(
                "--cache-config redis,sni={sni} cannot be followed: the server is asked for by its host, '{host}'; give \
                 the name in its certificate as host"
            );
        }
        let client = match (self.cert, self.key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => bail!("--cache-config redis needs cert and key together, or neither"),
        };
        Ok(RedisTls { authorities: self.authorities, client })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(texts: &[&str]) -> Result<Option<CacheSettings>> {
        parse(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>(), |_| None)
    }

    #[test]
    fn reads_the_redis_cache() {
        let base = ["redis,host=h", "redis,port=6379"];
        let with = |more: &[&str]| of(&[&base, more].concat()).expect("valid");
        let redis = |change: &dyn Fn(&mut RedisSettings)| {
            let mut settings = RedisSettings::new("h", 6379);
            change(&mut settings);
            Some(CacheSettings::Redis(Box::new(settings)))
        };
        assert_eq!(with(&[]), redis(&|_| {}));
        assert_eq!(with(&["redis,tls_enabled=false", "redis,socket_timeout=0"]), redis(&|_| {}));
        assert_eq!(
            with(&[
                "redis,user=u",
                "redis,password=p,=w",
                "redis,db=3",
                "redis,pool_size=4",
                "redis,wait_timeout=7"
            ]),
            redis(&|settings| {
                settings.user = Some("u".into());
                settings.password = Some("p,=w".into());
                settings.db = 3;
                settings.pool_size = 4;
                settings.wait_timeout = Duration::from_millis(7);
            })
        );
        let files = [
            "redis,cert=c.pem",
            "redis,key=k.pem",
            "redis,cacert=ca.pem",
            "redis,cacert_dir=cas",
            "redis,sni=h",
        ];
        assert_eq!(
            with(&[&["redis,tls_enabled=true"], &files[..]].concat()),
            redis(&|settings| {
                settings.tls = Some(RedisTls {
                    authorities: vec!["ca.pem".into(), "cas".into()],
                    client: Some(("c.pem".into(), "k.pem".into())),
                });
            })
        );
    }

    #[test]
    fn the_environment_may_say_who_logs_in() {
        let of = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            match parse(&texts, |name| Some(format!("value of {name}"))).expect("valid") {
                Some(CacheSettings::Redis(settings)) => (settings.user, settings.password),
                other => panic!("{other:?}"),
            }
        };
        let (user, password) = of(&["redis,host=h", "redis,port=1", "redis,user=flag"]);
        assert_eq!(user.as_deref(), Some("flag"));
        assert_eq!(password.as_deref(), Some("value of TRITONCACHE_REDIS_PASSWORD"));
    }

    #[test]
    fn reads_the_local_cache() {
        assert_eq!(of(&[]).expect("nothing asked for"), None);
        let local = |size| Some(CacheSettings::Local { size });
        assert_eq!(of(&["local,size=1048576"]).expect("valid"), local(1_048_576));
        assert_eq!(of(&["local,size=1", "local,size=4096"]).expect("the last counts"), local(4096));
    }

    #[test]
    fn says_what_is_wrong() {
        for (texts, want) in [
            (vec!["local"], "--cache-config expects local,size=BYTES"),
            (vec!["local,size"], "got 'local,size'"),
            (vec!["local,size=0"], "a number of bytes above 0, got '0'"),
            (vec!["local,size=1MB"], "a number of bytes above 0, got '1MB'"),
            (vec!["local,sizes=1"], "knows the setting size, got 'sizes'"),
            (vec!["redis,host=h"], "needs host and port"),
            (vec!["redis,host=h", "redis,port=0"], "a whole number from 1 to 65535, got '0'"),
            (vec!["redis,host=h", "redis,port=1", "redis,tls_enabled=maybe"], "expects true or false"),
            (vec!["redis,host=h", "redis,port=1", "redis,cacert=ca.pem"], "need tls_enabled=true"),
            (
                vec!["redis,host=h", "redis,port=1", "redis,tls_enabled=1", "redis,cert=c"],
                "cert and key together",
            ),
            (
                vec!["redis,host=h", "redis,port=1", "redis,tls_enabled=1", "redis,sni=other"],
                "asked for by its host",
            ),
            (vec!["redis,hots=h"], "got 'hots'"),
            (vec!["redis,host=h", "local,size=4096"], "names two: 'redis' and 'local'"),
            (vec!["lokal,size=1"], "there is no response cache 'lokal'"),
            (vec!["local,size=4096", "other,size=4096"], "names two: 'local' and 'other'"),
        ] {
            let got = of(&texts).expect_err("must be refused").to_string();
            assert!(got.contains(want), "{texts:?}\ngot  {got}\nwant {want}");
        }
    }
}
