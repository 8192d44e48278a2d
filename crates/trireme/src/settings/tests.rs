//! Flags and what they come to.

use clap::Command;

use super::*;

fn settings(args: &[&str]) -> Result<Settings> {
    let command =
        Flags::add_to(Command::new("serve").no_binary_name(true)).arg(clap::Arg::new("MODEL").num_args(0..));
    Settings::of(&Flags::of(&command.try_get_matches_from(args)?))
}

fn refusal(args: &[&str]) -> String {
    settings(args).expect_err("must be refused").to_string()
}

#[test]
fn defaults_are_tritons() {
    let settings = settings(&["--model-repository=/m"]).expect("valid");
    let http = settings.http.expect("on").0;
    assert_eq!((http.address.as_str(), http.port, http.reuse_port), ("0.0.0.0", 8000, false));
    assert_eq!(settings.grpc.expect("on").0.port, 8001);
    assert_eq!(settings.metrics.expect("on").port, 8002);
    assert_eq!(settings.exit_timeout, Duration::from_secs(30));
    assert!(settings.exit_on_error);
    assert_eq!(settings.server.repositories, [PathBuf::from("/m")]);
    assert!(settings.server.strict_readiness && !settings.server.strict_config);
}

#[test]
fn metrics_follow_the_http_address() {
    let metrics = |args: &[&str]| settings(args).expect("valid").metrics.expect("on").address;
    assert_eq!(metrics(&["--model-repository=/m", "--http-address=127.0.0.1"]), "127.0.0.1");
    assert_eq!(metrics(&["--model-repository=/m", "--http-address=::1", "--metrics-address=::"]), "::");
    assert_eq!(metrics(&["--model-repository=/m", "--allow-http=false", "--http-address=::1"]), "0.0.0.0");
}

#[test]
fn says_which_flag_is_wrong_and_what_it_wants() {
    let m = "--model-repository=/m";
    for (args, want) in [
        (vec![], "--model-repository must be specified"),
        (vec![m, "--http-port=70000"], "--http-port expects a whole number from 0 to 65535, got '70000'"),
        (vec![m, "--allow-http=maybe"], "--allow-http expects true or false"),
        (vec![m, "--load-model=a"], "--load-model is only for --model-control-mode=explicit"),
        (
            vec![m, "--model-control-mode=explicit", "--load-model=*", "--load-model=a"],
            "--load-model=* loads every",
        ),
        (vec![m, "--grpc-port=8000"], "both want 0.0.0.0:8000"),
        (vec![m, "--repository-poll-secs=0"], "--repository-poll-secs"),
        (vec![m, "--shm-max-bytes=0"], "--shm-max-bytes expects a whole number"),
        (vec![m, "--trace-config=level=TIMESTAMPS"], "tracing is not available yet"),
        (vec![m, "--cache-config=local,size=1MB"], "--cache-config local,size expects a number of bytes"),
        (
            vec![m, "--cache-config=local,size=4096", "--response-cache-byte-size=4096"],
            "--response-cache-byte-size and --cache-config cannot both be given",
        ),
        (vec!["--model-repository=s3://bucket/m"], "repositories on s3:// are not available yet"),
        (vec![m, "--backend-config=onnxruntime"], "--backend-config expects [BACKEND,]KEY=VALUE"),
        (
            vec![m, "--metrics-config=histogram_latencies=maybe"],
            "--metrics-config histogram_latencies expects true or false, got 'maybe'",
        ),
        (vec![m, "--metrics-config=latencies=true"], "--metrics-config knows counter_latencies"),
        (
            vec![m, "--metrics-config=summary_quantiles=0.5"],
            "--metrics-config summary_quantiles expects QUANTILE:ERROR",
        ),
        (vec![m, "--log-format=xml"], "--log-format expects default or ISO8601"),
        (vec![m, "--model-config-name=a b"], "without blanks"),
        (vec!["/no/such/model.onnx"], "there is no file or directory '/no/such/model.onnx'"),
    ] {
        let got = refusal(&args);
        assert!(got.contains(want), "{args:?}\ngot  {got}\nwant {want}");
    }
}

#[test]
fn features_to_come_are_harmless_at_their_default() {
    let settings = settings(&[
        "--model-repository=/m",
        "--rate-limit=off",
        "--grpc-use-ssl=false",
        "--trace-level=OFF",
        "--trace-config=level=OFF",
        "--response-cache-byte-size=0",
        "--http-thread-count=4",
    ])
    .expect("nothing is asked for");
    assert_eq!(settings.without_effect.len(), 1);
    assert!(settings.without_effect[0].starts_with("--http-thread-count is accepted and has no effect"));
}

#[test]
fn shared_memory_is_off_unless_asked_for() {
    let shared = |args: &[&str]| {
        let args: Vec<&str> = ["--model-repository=/m"].into_iter().chain(args.iter().copied()).collect();
        settings(&args).expect("valid").server.shared_memory
    };
    assert!(!shared(&[]).allowed);
    assert!(shared(&[]).max_bytes > 1 << 20, "the machine's memory");
    let limited = shared(&["--allow-client-shm=true", "--shm-max-regions=7", "--shm-max-bytes=4096"]);
    assert_eq!((limited.allowed, limited.max_regions, limited.max_bytes), (true, 7, 4096));
}

#[test]
fn old_spellings_are_followed_with_a_warning() {
    let old = settings(&["--model-store=/m", "--strict-model-config=true"]).expect("valid");
    assert!(old.server.strict_config);
    assert_eq!(old.warnings.len(), 1);
    let both =
        settings(&["--model-store=/m", "--strict-model-config=false", "--disable-auto-complete-config"]);
    assert!(both.expect("valid").server.strict_config, "the new flag wins");
}

#[test]
fn the_response_cache_has_an_old_spelling() {
    let cache = |args: &[&str]| {
        let settings = settings(&[&["--model-repository=/m"], args].concat()).expect("valid");
        (settings.server.cache, settings.warnings.len())
    };
    let local = Some(trireme_core::CacheSettings::Local { size: 4096 });
    assert_eq!(cache(&[]), (None, 0));
    assert_eq!(cache(&["--cache-config=local,size=4096"]), (local.clone(), 0));
    assert_eq!(cache(&["--response-cache-byte-size=4096"]), (local, 1));
    assert_eq!(cache(&["--response-cache-byte-size=0"]), (None, 1));
}

#[test]
fn model_files_get_names() {
    let root = tempfile::tempdir().expect("a directory");
    let file = root.path().join("net.onnx");
    fs_err::write(&file, b"x").expect("can write");
    let file = file.to_str().expect("UTF-8");
    let named = format!("other={file}");
    let server = settings(&[file, &named, root.path().to_str().expect("UTF-8")]).expect("valid").server;
    let names: Vec<_> = server.single_models.iter().map(|model| model.name.as_str()).collect();
    assert_eq!(names, ["net", "other"]);
    assert_eq!(server.repositories, [root.path()]);
    assert!(refusal(&[file, file]).contains("two models would be called 'net'"));
}

#[test]
fn backend_settings_may_be_for_all() {
    let server = settings(&[
        "--model-repository=/m",
        "--backend-config=default-max-batch-size=16",
        "--backend-config=onnxruntime,default-max-batch-size=8",
    ])
    .expect("valid")
    .server;
    assert_eq!(server.default_max_batch_size("onnxruntime"), 8);
    assert_eq!(server.default_max_batch_size("python"), 16);
}

#[test]
fn says_when_nobody_can_ask() {
    let alone =
        settings(&["--model-repository=/m", "--allow-http=false", "--allow-grpc=off"]).expect("valid");
    assert!(alone.warnings[0].contains("no client can ask this server"), "{:?}", alone.warnings);
    assert!(settings(&["--model-repository=/m", "--allow-http=false"]).expect("valid").warnings.is_empty());
}

#[test]
fn an_environment_made_for_vertex_ai_is_no_secret() {
    assert!(vertex_ai(Some("PREDICTION")).expect("a warning").contains("Vertex AI"));
    assert_eq!(vertex_ai(Some("x")), None);
    assert_eq!(vertex_ai(None), None);
}

#[test]
fn metrics_keep_what_they_are_asked_for() {
    let args = |more: &[&'static str]| {
        let asked = [
            "--model-repository=/m",
            "--metrics-config=histogram_latencies=true",
            "--metrics-config=summary_latencies=on",
            "--metrics-config=summary_quantiles=0.5:0.05,0.75:0.01",
            "--metrics-config=counter_latencies=false",
        ];
        settings(&[&asked, more].concat()).expect("valid").server
    };
    let server = args(&[]);
    assert!(server.latencies.histograms && server.latencies.summaries && !server.counter_latencies);
    assert_eq!(server.latencies.quantiles, [0.5, 0.75]);
    let unread = args(&["--allow-metrics=false"]);
    assert!(!unread.latencies.histograms && !unread.latencies.summaries, "nobody could read them");
}
