//! Text on stdout, progress on stderr.

use crate::failure::Failure;
use comfy_table::{ContentArrangement, Table};

/// Writes a line or several to stdout.
pub(crate) fn say(text: &str) -> Result<(), Failure> {
    use std::io::{ErrorKind, Write};
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush());
    written.map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => Failure::Closed,
        _ => Failure::work(format_args!("cannot write to stdout: {e}")),
    })
}

/// Writes a line to stderr that the results on stdout do not need.
pub(crate) fn note(text: &str) {
    use std::io::Write;
    // A reader who closed stderr does without.
    let _ = writeln!(std::io::stderr(), "note: {text}");
}

/// A table with these titles, as wide as the terminal at most; without a terminal as wide as its rows.
pub(crate) fn table<T: Into<comfy_table::Cell>>(titles: impl IntoIterator<Item = T>) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_BORDERS_ONLY);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(titles.into_iter().map(Into::into).collect::<Vec<comfy_table::Cell>>());
    table
}

/// Whether output goes to a terminal whose user did not refuse colours (`NO_COLOR`).
pub(crate) fn colour(stream: &impl std::io::IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// A cell of a table, in green or red if it is a verdict and the terminal has colours.
pub(crate) fn verdict(text: String, good: bool) -> comfy_table::Cell {
    let cell = comfy_table::Cell::new(text);
    let colour = if good { comfy_table::Color::Green } else { comfy_table::Color::Red };
    if self::colour(&std::io::stdout()) { cell.fg(colour) } else { cell }
}

/// A progress bar on stderr; hidden where stderr is not a terminal.
pub(crate) fn progress(steps: usize) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new(steps as u64);
    let style = indicatif::ProgressStyle::with_template("{bar:32} {pos}/{len} {elapsed}, {eta} left {msg}");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    bar
}
