//! What was typed: every flag of `tritonserver`, kept as text. What the words mean is decided in `settings`.
//!
//! Invariant: every flag that Triton's parser knows stands in [`flags`], and each says what becomes of it
//! here: it is used, it is accepted without effect for a reason, or it is refused until its feature is built.

mod table;

use clap::{Arg, ArgAction, ArgMatches, Command};

pub(crate) use table::flags;

/// How many values a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// One value; the last one given counts.
    One,
    /// One value each time it is given.
    Many,
    /// No value.
    Nothing,
}

/// What becomes of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Used,
    /// Accepted; the reason why nothing comes of it is logged.
    NoEffect(&'static str),
    /// Refused unless it has its default value; names the feature.
    Later(&'static str),
}

/// One flag.
#[derive(Debug)]
pub(crate) struct Flag {
    pub(crate) name: &'static str,
    /// Other spelling of the same flag.
    pub(crate) alias: Option<&'static str>,
    pub(crate) group: &'static str,
    pub(crate) takes: Takes,
    pub(crate) value: &'static str,
    /// Default as Triton documents it; empty if there is none.
    pub(crate) default: &'static str,
    pub(crate) fate: Fate,
    pub(crate) help: &'static str,
}

/// The flags of a command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags {
    given: Vec<(&'static Flag, Vec<String>)>,
    /// Arguments that are not flags: model files, `name=path` or a repository.
    pub(crate) models: Vec<String>,
}

impl Flags {
    /// The flags as clap arguments, in Triton's groups.
    pub(crate) fn add_to(command: Command) -> Command {
        flags().fold(command.infer_long_args(true), |command, flag| command.arg(flag.arg()))
    }

    pub(crate) fn of(matches: &ArgMatches) -> Self {
        let values = |flag: &'static Flag| -> Option<Vec<String>> {
            if flag.takes == Takes::Nothing {
                return matches.get_flag(flag.name).then(|| vec!["true".to_owned()]);
            }
            matches.get_many::<String>(flag.name).map(|values| values.cloned().collect())
        };
        let given = flags().filter_map(|flag| Some((flag, values(flag)?))).collect();
        let models = matches.try_get_many::<String>("MODEL").ok().flatten();
        Self { given, models: models.map(|models| models.cloned().collect()).unwrap_or_default() }
    }

    /// Flags that were given, with their values.
    pub(crate) fn given(&self) -> impl Iterator<Item = (&'static Flag, &[String])> {
        self.given.iter().map(|(flag, values)| (*flag, values.as_slice()))
    }

    /// All values of a flag, none if it was not given.
    pub(crate) fn all(&self, name: &str) -> &[String] {
        self.given
            .iter()
            .find(|(flag, _)| flag.name == name)
            .map(|(_, values)| values.as_slice())
            .unwrap_or_default()
    }

    /// The last value of a flag.
    pub(crate) fn last(&self, name: &str) -> Option<&str> {
        self.all(name).last().map(String::as_str)
    }
}

impl Flag {
    fn arg(&'static self) -> Arg {
        let action = match self.takes {
            Takes::One => ArgAction::Set,
            Takes::Many => ArgAction::Append,
            Takes::Nothing => ArgAction::SetTrue,
        };
        let mut help = self.help.to_owned();
        if !self.default.is_empty() {
            help = format!("{help} [default: {}]", self.default);
        }
        match self.fate {
            Fate::Used => {}
            Fate::NoEffect(why) => help = format!("{help} Accepted without effect: {why}."),
            Fate::Later(feature) => help = format!("{help} Not available yet: {feature}."),
        }
        let mut arg = Arg::new(self.name).long(self.name).action(action).help(help).help_heading(self.group);
        if self.takes == Takes::One {
            arg = arg.overrides_with(self.name);
        }
        if self.takes != Takes::Nothing {
            arg = arg.value_name(self.value).num_args(1).allow_hyphen_values(true);
        }
        match self.alias {
            Some(alias) => arg.alias(alias),
            None => arg,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Flags, clap::Error> {
        let command = Flags::add_to(Command::new("tritonserver").no_binary_name(true));
        command.try_get_matches_from(args).map(|matches| Flags::of(&matches))
    }

    #[test]
    fn takes_both_forms_prefixes_and_aliases() {
        let flags = parse(&[
            "--http-port=9000",
            "--grpc-port",
            "9001",
            "--model-store",
            "/a",
            "--model-repository=/b",
        ])
        .expect("valid");
        assert_eq!(flags.last("http-port"), Some("9000"));
        assert_eq!(flags.last("grpc-port"), Some("9001"));
        assert_eq!(flags.all("model-repository"), ["/a", "/b"]);
        assert_eq!(parse(&["--cache-dir=/c"]).expect("a prefix").last("cache-directory"), Some("/c"));
        assert_eq!(
            parse(&["--http-port=1", "--http-port=2"]).expect("given twice").last("http-port"),
            Some("2")
        );
        assert_eq!(
            parse(&["--model-load-retry-count", "-1"]).expect("a number").last("model-load-retry-count"),
            Some("-1")
        );
    }

    #[test]
    fn refuses_what_no_flag_is_called() {
        let error = parse(&["--http-prt=1"]).expect_err("unknown").to_string();
        assert!(error.contains("--http-port"), "{error}");
        parse(&["--http"]).expect_err("ambiguous");
        parse(&["--http-port"]).expect_err("no value");
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<&str> = flags().flat_map(|flag| [Some(flag.name), flag.alias]).flatten().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    /// Every option of the reference parser (`command_line_parser.cc`, 26.09), `--help` aside.
    #[test]
    fn knows_every_flag_of_tritonserver() {
        const KNOWN: &str = "id exit-timeout-secs log-verbose log-info log-warning log-error log-format log-file \
            model-repository model-store exit-on-error disable-auto-complete-config strict-readiness \
            model-control-mode repository-poll-secs load-model model-config-name model-load-thread-count \
            model-load-retry-count model-namespacing enable-peer-access allow-http http-address http-port \
            reuse-http-port http-header-forward-pattern http-thread-count http-max-input-size http-restricted-api \
            allow-grpc grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern grpc-infer-thread-count \
            grpc-infer-allocation-pool-size grpc-max-response-pool-size grpc-use-ssl grpc-use-ssl-mutual \
            grpc-server-cert grpc-server-key grpc-root-cert grpc-infer-response-compression-level \
            grpc-keepalive-time grpc-keepalive-timeout grpc-keepalive-permit-without-calls \
            grpc-http2-max-pings-without-data grpc-http2-min-recv-ping-interval-without-data \
            grpc-http2-max-ping-strikes grpc-max-connection-age grpc-max-connection-age-grace \
            grpc-restricted-protocol allow-sagemaker sagemaker-port sagemaker-safe-port-range \
            sagemaker-thread-count allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model \
            allow-metrics allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms \
            metrics-config trace-config backend-directory backend-config repoagent-directory cache-config \
            cache-directory rate-limit rate-limit-resource pinned-memory-pool-byte-size \
            cuda-memory-pool-byte-size cuda-virtual-address-size min-supported-compute-capability \
            buffer-manager-thread-count host-policy model-load-gpu-limit allow-client-shm strict-model-config \
            response-cache-byte-size trace-file trace-level trace-rate trace-count trace-log-frequency";
        for name in KNOWN.split_ascii_whitespace() {
            let known = flags().any(|flag| flag.name == name || flag.alias == Some(name));
            assert!(known, "--{name} is missing");
        }
        assert_eq!(KNOWN.split_ascii_whitespace().count(), 90, "the 91 registered names, --help aside");
    }
}
