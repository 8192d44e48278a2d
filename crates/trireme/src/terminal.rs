//! Standard output and standard error of the tools: whole texts at once, colours for a terminal only, and no complaint
//! when the reader has left (`trireme check | head`).

use std::fmt;
use std::io::{self, IsTerminal as _, Write};

use anyhow::{Context as _, Result};
use clap::builder::styling::{AnsiColor, Style};

/// What a piece of text is, for its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    Bad,
    Doubtful,
    Title,
}

/// Whether texts are coloured: only on a terminal, and never when `NO_COLOR` is set (<https://no-color.org>).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Colours(bool);

impl Colours {
    #[cfg(test)]
    pub(crate) const NONE: Self = Self(false);

    pub(crate) fn for_stdout() -> Self {
        Self(io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()))
    }

    /// The text in the colour of its tone.
    pub(crate) fn paint(self, tone: Tone, text: impl fmt::Display) -> String {
        if !self.0 {
            return text.to_string();
        }
        let style = match tone {
            Tone::Good => AnsiColor::Green.on_default().bold(),
            Tone::Bad => AnsiColor::Red.on_default().bold(),
            Tone::Doubtful => AnsiColor::Yellow.on_default().bold(),
            Tone::Title => Style::new().bold(),
        };
        format!("{style}{text}{style:#}")
    }
}

/// Writes a text to standard output.
pub(crate) fn print(text: &str) -> Result<()> {
    write_whole(&mut io::stdout().lock(), text).context("cannot write to standard output")
}

/// Writes a text to standard error.
pub(crate) fn warn(text: &str) -> Result<()> {
    write_whole(&mut io::stderr().lock(), text).context("cannot write to standard error")
}

fn write_whole(stream: &mut dyn Write, text: &str) -> io::Result<()> {
    match stream.write_all(text.as_bytes()).and_then(|()| stream.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome,
    }
}

/// A text with every line after the first moved to the right.
pub(crate) fn indent_rest(text: &str, blanks: usize) -> String {
    text.trim_end().replace('\n', &format!("\n{:blanks$}", ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_only_where_they_are_wanted() {
        assert_eq!(Colours::NONE.paint(Tone::Bad, "failed"), "failed");
        assert_eq!(Colours(true).paint(Tone::Title, "m"), "\u{1b}[1mm\u{1b}[0m");
    }

    #[test]
    fn a_reader_that_left_is_no_error() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        write_whole(&mut Closed, "x").expect("not an error");
    }

    #[test]
    fn indents_what_follows_the_first_line() {
        assert_eq!(indent_rest("a\n b\nc\n", 2), "a\n   b\n  c");
    }
}
