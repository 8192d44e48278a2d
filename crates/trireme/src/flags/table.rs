//! Every flag in Triton's groups, with what it trades.

use super::{Fate, Flag, Takes};

const fn flag(name: &'static str, value: &'static str, default: &'static str, help: &'static str) -> Flag {
    Flag { name, alias: None, group: "", takes: Takes::One, value, default, fate: Fate::Used, help }
}

const fn switch(name: &'static str, help: &'static str) -> Flag {
    Flag { takes: Takes::Nothing, ..flag(name, "", "", help) }
}

impl Flag {
    const fn many(mut self) -> Self {
        self.takes = Takes::Many;
        self
    }

    const fn alias(mut self, alias: &'static str) -> Self {
        self.alias = Some(alias);
        self
    }

    const fn no_effect(mut self, why: &'static str) -> Self {
        self.fate = Fate::NoEffect(why);
        self
    }

    const fn later(mut self, feature: &'static str) -> Self {
        self.fate = Fate::Later(feature);
        self
    }
}

const fn group<const N: usize>(name: &'static str, mut flags: [Flag; N]) -> [Flag; N] {
    let mut i = 0;
    while i < N {
        flags[i].group = name;
        i += 1;
    }
    flags
}

/// All flags.
pub(crate) fn flags() -> impl Iterator<Item = &'static Flag> {
    GROUPS.iter().flat_map(|group| group.iter())
}

static GROUPS: &[&[Flag]] = &[
    &group("Server", [
        flag("id", "NAME", "triton", "Name that the server gives in its metadata; lets clients tell replicas apart."),
        flag("exit-timeout-secs", "SECONDS", "30", "How long a stop waits for requests in flight. Longer loses fewer requests, shorter restarts sooner; with nothing in flight a stop takes no time in either case."),
    ]),
    &group("Logging", [
        flag("log-verbose", "LEVEL", "0", "Verbose messages: 0 none, 1 what the server decides, 2 and above also each request. Costs time per request from 2 on."),
        flag("log-info", "BOOL", "true", "Informational messages."),
        flag("log-warning", "BOOL", "true", "Warnings. Turning them off hides settings that have no effect."),
        flag("log-error", "BOOL", "true", "Errors. Turning them off hides why models fail."),
        flag("log-format", "default|ISO8601", "default", "Time stamp of each message: compact, or sortable and with the year."),
        flag("log-file", "PATH", "", "Write messages to this file rather than to standard error."),
    ]),
    &group("Model Repository", [
        flag("model-repository", "PATH", "", "Directory with one folder a model; may be given several times. The same model name in two of them cannot be served.").many().alias("model-store"),
        flag("exit-on-error", "BOOL", "true", "End when a model fails to load. false serves the models that did load, at the price that a deployment with a broken model looks alive."),
        switch("disable-auto-complete-config", "Demand complete configurations instead of reading inputs and outputs from model files. Catches drift between file and configuration, costs writing every tensor down."),
        flag("strict-readiness", "BOOL", "true", "Report ready only when every model is. false reports ready while models load or have failed."),
        flag("model-control-mode", "none|poll|explicit", "none", "none: load everything once. explicit: load what --load-model and the repository API name. poll: follow what changes on disk, which is convenient, and loads whatever anybody puts there."),
        flag("repository-poll-secs", "SECONDS", "15", "Seconds between looks at the repository in poll mode. Fewer see a change sooner and read the directories more often."),
        flag("load-model", "NAME", "", "Model to load at start in explicit mode; may be given several times. A single * loads all.").many(),
        flag("model-config-name", "NAME", "", "Use configs/NAME.pbtxt of a model where it exists, else its config.pbtxt. One repository then serves several kinds of machine."),
        flag("model-load-thread-count", "COUNT", "4", "Models loaded at once. More starts sooner and needs more memory while loading."),
        flag("model-load-retry-count", "COUNT", "0", "Tries after a load that failed. Helps on flaky storage, delays the report of a broken model."),
        flag("model-namespacing", "BOOL", "false", "Allow the same model name in several repositories.").later("model namespaces"),
        flag("enable-peer-access", "BOOL", "true", "Copies between GPUs without the CPU.").no_effect("no GPU is used"),
    ]),
    &group("HTTP", [
        flag("allow-http", "BOOL", "true", "Serve HTTP/REST."),
        flag("http-address", "ADDRESS", "0.0.0.0", "Address of the HTTP port; 127.0.0.1 keeps it on this machine. Also the default of --metrics-address."),
        flag("http-port", "PORT", "8000", "Port of the HTTP service."),
        flag("reuse-http-port", "BOOL", "false", "SO_REUSEPORT: several servers share the port and the kernel spreads connections over them. Hides that a forgotten server is still there."),
        flag("http-header-forward-pattern", "REGEX", "", "Headers whose name matches reach the model as parameters."),
        flag("http-thread-count", "COUNT", "8", "Threads for HTTP.").no_effect("connections share the network threads, two or fewer if there are fewer cores"),
        flag("http-max-input-size", "BYTES", "67108864", "Limit on the JSON part of a request, on raw and on decompressed bodies. Higher takes bigger requests and lets one client use more memory."),
        flag("http-restricted-api", "API,API:KEY=VALUE", "", "Answer these APIs only when the request has the header KEY with VALUE: health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace, logging.").many(),
    ]),
    &group("GRPC", [
        flag("allow-grpc", "BOOL", "true", "Serve gRPC."),
        flag("grpc-address", "ADDRESS", "0.0.0.0", "Address of the gRPC port."),
        flag("grpc-port", "PORT", "8001", "Port of the gRPC service."),
        flag("reuse-grpc-port", "BOOL", "false", "SO_REUSEPORT, as --reuse-http-port."),
        flag("grpc-header-forward-pattern", "REGEX", "", "Metadata whose name matches reaches the model as parameters."),
        flag("grpc-infer-thread-count", "COUNT", "2", "Threads that take unary inference requests.").no_effect("connections share the network threads"),
        flag("grpc-infer-allocation-pool-size", "COUNT", "8", "Request states kept for reuse.").no_effect("requests need no retained states"),
        flag("grpc-max-response-pool-size", "COUNT", "2147483647", "Responses of a stream that may wait to be sent; a slow reader then slows its model instead of filling memory."),
        flag("grpc-use-ssl", "BOOL", "false", "Encrypt gRPC.").later("TLS on the gRPC port"),
        flag("grpc-use-ssl-mutual", "BOOL", "false", "Encrypt gRPC and demand client certificates.").later("TLS on the gRPC port"),
        flag("grpc-server-cert", "PATH", "", "PEM file with the server's certificate.").later("TLS on the gRPC port"),
        flag("grpc-server-key", "PATH", "", "PEM file with the server's private key.").later("TLS on the gRPC port"),
        flag("grpc-root-cert", "PATH", "", "PEM file with the certificates that clients are checked against.").later("TLS on the gRPC port"),
        flag("grpc-infer-response-compression-level", "none|low|medium|high", "none", "Compress inference responses for clients that accept it: less network for more CPU; tensors of weights and images hardly shrink."),
        flag("grpc-keepalive-time", "MS", "7200000", "Idle time after which the server asks whether the client is still there."),
        flag("grpc-keepalive-timeout", "MS", "20000", "Time that the client has to answer before its connection is closed."),
        flag("grpc-keepalive-permit-without-calls", "BOOL", "false", "Ask also when no call is open.").no_effect("keepalive questions are always allowed"),
        flag("grpc-http2-max-pings-without-data", "COUNT", "2", "Pings in a row without data between.").no_effect("the HTTP/2 library paces its own pings"),
        flag("grpc-http2-min-recv-ping-interval-without-data", "MS", "300000", "Shortest time between a client's pings.").no_effect("clients may ping as they like"),
        flag("grpc-http2-max-ping-strikes", "COUNT", "2", "Early pings before a connection is closed.").no_effect("clients may ping as they like"),
        flag("grpc-max-connection-age", "MS", "", "Age at which a connection is closed, so that clients spread over new servers."),
        flag("grpc-max-connection-age-grace", "MS", "", "Time for calls in flight after that age."),
        flag("grpc-restricted-protocol", "API,API:KEY=VALUE", "", "As --http-restricted-api, with the metadata triton-grpc-protocol-KEY.").many(),
    ]),
    &group("SageMaker", [
        flag("allow-sagemaker", "BOOL", "false", "Serve the SageMaker endpoint.").later("the SageMaker endpoint"),
        flag("sagemaker-port", "PORT", "8080", "Its port.").later("the SageMaker endpoint"),
        flag("sagemaker-safe-port-range", "LOW-HIGH", "", "Range that other ports must stay in.").later("the SageMaker endpoint"),
        flag("sagemaker-thread-count", "COUNT", "8", "Its threads.").no_effect("there is no SageMaker endpoint yet"),
    ]),
    &group("Vertex AI", [
        flag("allow-vertex-ai", "BOOL", "false", "Serve the Vertex AI endpoint.").later("the Vertex AI endpoint"),
        flag("vertex-ai-port", "PORT", "8080", "Its port.").later("the Vertex AI endpoint"),
        flag("vertex-ai-thread-count", "COUNT", "8", "Its threads.").no_effect("there is no Vertex AI endpoint yet"),
        flag("vertex-ai-default-model", "NAME", "", "Model of requests that name none.").later("the Vertex AI endpoint"),
    ]),
    &group("Metrics", [
        flag("allow-metrics", "BOOL", "true", "Serve Prometheus metrics."),
        flag("allow-gpu-metrics", "BOOL", "true", "GPU metrics.").no_effect("no GPU is used"),
        flag("allow-cpu-metrics", "BOOL", "true", "CPU and memory of the machine in the metrics."),
        flag("metrics-address", "ADDRESS", "the HTTP address", "Address of the metrics port."),
        flag("metrics-port", "PORT", "8002", "Port of the metrics service."),
        flag("metrics-interval-ms", "MS", "2000", "Time between readings of gauges.").no_effect("values are read when they are asked for"),
        flag("metrics-config", "KEY=VALUE", "", "counter_latencies=BOOL (true) shows the summed latencies; histogram_latencies=BOOL (false) adds a histogram of the time to the first response; summary_latencies=BOOL (false) adds quantiles of the last minute, those of summary_quantiles=QUANTILE:ERROR,...").many(),
    ]),
    &group("Tracing", [
        flag("trace-config", "[MODE,]KEY=VALUE", "", "What is traced and where to.").many().later("tracing"),
    ]),
    &group("Backend", [
        flag("backend-directory", "PATH", "/opt/tritonserver/backends", "Where backend libraries lie.").later("hosting Triton backend libraries"),
        flag("backend-config", "[BACKEND,]KEY=VALUE", "", "Setting of a backend, or of all of them: default-max-batch-size=N, onnxruntime,library-path=PATH, onnxruntime,intra_op_thread_count=N, ...").many(),
        flag("repoagent-directory", "PATH", "/opt/tritonserver/repoagents", "Where repository agents lie.").no_effect("there are no repository agents yet"),
    ]),
    &group("Response Cache", [
        flag("cache-config", "NAME,KEY=VALUE", "", "The response cache, for models with response_cache { enable: true }. local,size=BYTES: in the server's memory; a larger one answers more requests without running the model. redis,host=HOST and redis,port=PORT: shared with other servers and kept over restarts, for a round trip a request. One setting each time.").many(),
        flag("cache-directory", "PATH", "/opt/tritonserver/caches", "Where cache libraries lie.").no_effect("the response caches are built in"),
    ]),
    &group("Rate Limiter", [
        flag("rate-limit", "off|execution_count", "off", "execution_count: an instance runs only while it holds the resources that its rate_limiter names. Keeps models that share something from running at once, at the price of throughput."),
        flag("rate-limit-resource", "NAME:COUNT[:DEVICE]", "", "How much there is of a resource, on one device or on each; may be given several times. Otherwise as much as the instance that needs most of it.").many(),
    ]),
    &group("Memory and Devices", [
        flag("pinned-memory-pool-byte-size", "BYTES", "268435456", "Pinned memory for copies to GPUs.").no_effect("no GPU is used"),
        flag("cuda-memory-pool-byte-size", "GPU:BYTES", "", "Memory pool of a GPU.").many().no_effect("no GPU is used"),
        flag("cuda-virtual-address-size", "GPU:BYTES", "", "Address space for growing states.").many().no_effect("no GPU is used"),
        flag("min-supported-compute-capability", "NUMBER", "7.5", "Oldest GPU to use.").no_effect("no GPU is used"),
        flag("buffer-manager-thread-count", "COUNT", "0", "Threads that gather batches.").no_effect("tensors are copied at most once, by the thread that runs the model"),
        flag("host-policy", "NAME,KEY=VALUE", "", "Cores that instances run on: NAME,cpu-cores=0-3 or NAME,numa-node=N. NAME is a host_policy of instance groups; cpu is that of all KIND_CPU groups that name none, model that of KIND_MODEL. Keeps models apart, and leaves cores unused when only one of them is busy.").many(),
        flag("model-load-gpu-limit", "GPU:FRACTION", "", "GPU memory above which loads are refused.").many().no_effect("no GPU is used"),
    ]),
    &group("Shared Memory", [
        flag("allow-client-shm", "BOOL", "false", "Let clients pass tensors through shared memory: fastest for large tensors on one machine. Whoever can reach the server can then have it read and write the objects in /dev/shm that it may open."),
        flag("shm-max-regions", "COUNT", "4096", "Regions that may be registered at a time. Not a flag of tritonserver."),
        flag("shm-max-bytes", "BYTES", "the machine's memory", "Bytes that all registered regions may have together; memory of clients that the server keeps from being freed. Not a flag of tritonserver."),
    ]),
    &group("Deprecated", [
        flag("strict-model-config", "BOOL", "false", "true is --disable-auto-complete-config."),
        flag("response-cache-byte-size", "BYTES", "0", "Use --cache-config local,size=BYTES."),
        flag("trace-file", "PATH", "", "Use --trace-config triton,file=PATH.").later("tracing"),
        flag("trace-level", "LEVEL", "OFF", "Use --trace-config level=LEVEL.").many().later("tracing"),
        flag("trace-rate", "RATE", "1000", "Use --trace-config rate=RATE.").later("tracing"),
        flag("trace-count", "COUNT", "-1", "Use --trace-config count=COUNT.").later("tracing"),
        flag("trace-log-frequency", "COUNT", "0", "Use --trace-config triton,log-frequency=COUNT.").later("tracing"),
    ]),
    &group("Engines", [
        flag("onnxruntime-library", "PATH", "", "The ONNX Runtime library to load (libonnxruntime.so). Not a flag of tritonserver."),
        flag("cpu-fallback", "BOOL", "false", "Run instance groups of KIND_GPU on the CPU when there is no such GPU: one repository for GPU servers and laptops, at the price that a missing GPU is only a warning. Not a flag of tritonserver."),
        flag("core-count", "COUNT", "what the scheduler and cgroup allow", "Cores that models share. Not a flag of tritonserver."),
    ]),
];
