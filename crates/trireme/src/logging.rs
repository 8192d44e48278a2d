//! Log messages in Triton's two forms.
//!
//! `default`: `I1130 23:40:55.123456 4711 server.rs:52] "message"`; `ISO8601`: `2026-11-30T23:40:55Z I 4711
//! server.rs:52] "message"`. The message is a JSON string, so that nothing a client sends can fake a line
//! (`TRITON_SERVER_ESCAPE_LOG_MESSAGES=0` writes it as it is). Times are UTC.
//! Source: Triton `common/src/logging.cc`, documentation of `--log-format`.

use std::fmt::{self, Write as _};
use std::io;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use parking_lot::{Mutex, RwLock};
use time::OffsetDateTime;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, MakeWriter};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Registry, reload};
use trireme_core::{LogControl, LogFormat, LogSettings};

/// Messages to this target are tables: written as they are, below their header line.
pub(crate) const TABLE: &str = "trireme::table";

/// Verbose level from which messages of other libraries are shown.
const VERBOSE_LIBRARIES: u32 = 3;

/// Starts logging for the process, and gives what changes it while it runs.
///
/// # Errors
/// The log file cannot be opened.
pub(crate) fn start(settings: &LogSettings) -> Result<Arc<dyn LogControl>> {
    let writer: Box<dyn io::Write + Send> = match settings.file.as_str() {
        "" => Box::new(io::stderr()),
        path => Box::new(
            fs_err::OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .context("--log-file expects a file that can be written")?,
        ),
    };
    let escape = std::env::var("TRITON_SERVER_ESCAPE_LOG_MESSAGES").map_or(true, |value| value != "0");
    let format = Arc::new(RwLock::new(settings.format));
    let (filter, handle) = reload::Layer::new(filter(settings));
    let layer = tracing_subscriber::fmt::layer()
        .event_format(TritonFormat { format: Arc::clone(&format), escape })
        .with_writer(Sink(Mutex::new(writer)))
        .with_filter(filter);
    tracing_subscriber::registry().with(layer).try_init().context("logging is already running")?;
    Ok(Arc::new(RunningLog { settings: Mutex::new(settings.clone()), format, filter: handle }))
}

type Filter = FilterFn<Box<dyn Fn(&Metadata<'_>) -> bool + Send + Sync>>;

/// The log that was started.
struct RunningLog {
    settings: Mutex<LogSettings>,
    format: Arc<RwLock<LogFormat>>,
    filter: reload::Handle<Filter, Registry>,
}

impl fmt::Debug for RunningLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RunningLog").field(&*self.settings.lock()).finish()
    }
}

impl LogControl for RunningLog {
    fn settings(&self) -> LogSettings {
        self.settings.lock().clone()
    }

    fn follow(&self, settings: &LogSettings) {
        let mut current = self.settings.lock();
        current.clone_from(settings);
        *self.format.write() = settings.format;
        // It fails only if the log is gone, and then there is nothing to be changed.
        let _ = self.filter.reload(filter(settings));
    }
}

/// What is shown under these settings.
fn filter(settings: &LogSettings) -> Filter {
    let most = match settings.verbose_level {
        0 => LevelFilter::INFO,
        1 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let settings = settings.clone();
    let shows: Box<dyn Fn(&Metadata<'_>) -> bool + Send + Sync> =
        Box::new(move |metadata| shows(&settings, metadata));
    FilterFn::new(shows).with_max_level_hint(most)
}

fn shows(settings: &LogSettings, metadata: &Metadata<'_>) -> bool {
    let ours = metadata.target().starts_with("trireme") || metadata.target().starts_with("onnxruntime");
    if !ours && settings.verbose_level < VERBOSE_LIBRARIES {
        return false;
    }
    match *metadata.level() {
        Level::ERROR => settings.error,
        Level::WARN => settings.warning,
        Level::INFO => settings.info,
        Level::DEBUG => settings.verbose_level >= 1,
        Level::TRACE => settings.verbose_level >= 2,
    }
}

struct Sink(Mutex<Box<dyn io::Write + Send>>);

/// Writes one event at once, so that lines of several threads do not mix.
struct SinkGuard<'a>(parking_lot::MutexGuard<'a, Box<dyn io::Write + Send>>);

impl io::Write for SinkGuard<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl<'a> MakeWriter<'a> for Sink {
    type Writer = SinkGuard<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        SinkGuard(self.0.lock())
    }
}

struct TritonFormat {
    format: Arc<RwLock<LogFormat>>,
    escape: bool,
}

impl<S, N> FormatEvent<S, N> for TritonFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let mut message = Message::default();
        event.record(&mut message);
        let file = metadata.file().and_then(|file| file.rsplit(['/', '\\']).next()).unwrap_or("trireme");
        let now = OffsetDateTime::now_utc();
        write!(writer, "{}", Header { format: *self.format.read(), level: *metadata.level(), now })?;
        write!(writer, " {} {file}:{}] ", std::process::id(), metadata.line().unwrap_or(0))?;
        if metadata.target() == TABLE {
            return writeln!(writer, "\n{}", message.0);
        }
        if self.escape {
            let quoted = serde_json::to_string(&message.0).map_err(|_| fmt::Error)?;
            writeln!(writer, "{quoted}")
        } else {
            writeln!(writer, "{}", message.0)
        }
    }
}

struct Header {
    format: LogFormat,
    level: Level,
    now: OffsetDateTime,
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.level {
            Level::ERROR => 'E',
            Level::WARN => 'W',
            Level::INFO | Level::DEBUG | Level::TRACE => 'I',
        };
        let now = self.now;
        let (month, day) = (u8::from(now.month()), now.day());
        let (hour, minute, second) = (now.hour(), now.minute(), now.second());
        match self.format {
            LogFormat::Default => {
                let micros = now.microsecond();
                write!(f, "{letter}{month:02}{day:02} {hour:02}:{minute:02}:{second:02}.{micros:06}")
            }
            LogFormat::Iso8601 => {
                let year = now.year();
                write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z {letter}")
            }
        }
    }
}

/// The message of an event with its fields behind it.
#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _infallible = if field.name() == "message" {
            write!(self.0, "{value:?}")
        } else {
            write!(self.0, " {}={value:?}", field.name())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_tritons() {
        let now = OffsetDateTime::from_unix_timestamp_nanos(1_796_081_455_123_456_789).expect("a time");
        let header = |format, level| Header { format, level, now }.to_string();
        assert_eq!(header(LogFormat::Default, Level::INFO), "I1130 23:30:55.123456");
        assert_eq!(header(LogFormat::Default, Level::DEBUG), "I1130 23:30:55.123456");
        assert_eq!(header(LogFormat::Iso8601, Level::WARN), "2026-11-30T23:30:55Z W");
        assert_eq!(header(LogFormat::Default, Level::ERROR), "E1130 23:30:55.123456");
    }
}
