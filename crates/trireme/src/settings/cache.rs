//! The response cache that `--cache-config` and the older `--response-cache-byte-size` ask for.

use anyhow::{Result, bail};
use trireme_core::CacheSettings;

use super::value::number;
use crate::flags::Flags;

/// What a `--cache-config` looks like.
const FORM: &str = "--cache-config expects local,size=BYTES";

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

#[cfg(test)]
mod tests {
    use super::*;

    fn of(texts: &[&str]) -> Result<Option<CacheSettings>> {
        cache_settings(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
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
            (vec!["lokal,size=1"], "there is no response cache 'lokal'"),
            (vec!["local,size=4096", "other,size=4096"], "names two: 'local' and 'other'"),
        ] {
            let got = of(&texts).expect_err("must be refused").to_string();
            assert!(got.contains(want), "{texts:?}\ngot  {got}\nwant {want}");
        }
    }
}
