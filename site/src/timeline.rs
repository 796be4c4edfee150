//! Timelines of kernels: the spans of one CTA by the simulator's clock, each with its Rust line and the PTX of that line.

use fulgurite::gpu::{Target, kernels};
use fulgurite::sim::{Interleaving, Options, Period, Sizes, Track, simulate};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::path::Path;

/// PTX lines that are shown of one Rust line; unrolled loops repeat them.
const MOST_PTX: usize = 14;

/// What the page of a kernel shows.
pub fn of(root: &Path, name: &str, sizes: &Sizes) -> Result<Value, Box<dyn Error>> {
    let done = simulate(name, sizes, &Options { order: Interleaving::Timed, ..Options::default() })?;
    if let Some(finding) = done.report.findings.first() {
        return Err(format!("{name}: {finding}").into());
    }
    let timeline = done.report.timeline.ok_or("the simulator made no timeline")?;
    let spans: Vec<&Period> = timeline.spans.iter().filter(|span| span.block == 0).collect();
    let mut tracks: Vec<&Track> = spans.iter().map(|span| &span.track).collect();
    tracks.sort();
    tracks.dedup();
    let entry = kernels().iter().find(|entry| entry.name == name).ok_or("the kernel is in no list")?;
    let ptx = ptx_by_line(&(entry.build)(Target::HOPPER)?.ptx());
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    let mut lines = Vec::new();
    let mut sources = HashMap::new();
    let rows: Vec<Value> = spans
        .iter()
        .map(|span| {
            let at = span.line.to_string();
            let number = *numbers.entry(at.clone()).or_insert_with(|| {
                let (shown, more) = ptx
                    .get(&at)
                    .map_or((&[][..], 0), |all| (&all[..all.len().min(MOST_PTX)], all.len().saturating_sub(MOST_PTX)));
                let rust = source(root, span.line.file, span.line.line, &mut sources);
                lines.push(json!({"at": at, "rust": rust, "ptx": shown, "more": more}));
                lines.len() - 1
            });
            let track = tracks.iter().position(|track| **track == span.track);
            json!([track, span.start, span.end, span.what, u8::from(span.waits), number])
        })
        .collect();
    Ok(json!({
        "kernel": name,
        "summary": entry.summary,
        "problem": done.problem,
        "cycles": spans.iter().map(|span| span.end).max(),
        "tracks": tracks.iter().map(|track| words(track)).collect::<Vec<String>>(),
        "spans": rows,
        "lines": lines,
    }))
}

fn words(track: &Track) -> String {
    match track {
        Track::Role(role, number) if role.is_empty() => format!("threads {number}"),
        Track::Role(role, number) => format!("{role} {number}"),
        Track::Tensor => "tensor cores".into(),
        Track::Copy => "TMA".into(),
    }
}

/// The instructions that each Rust line printed, without repetitions, by the `.loc` lines of the text.
fn ptx_by_line(text: &str) -> HashMap<String, Vec<String>> {
    let files: HashMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix(".file "))
        .filter_map(|rest| Some((rest.split(' ').next()?, rest.split('"').nth(1)?)))
        .collect();
    let mut found: HashMap<String, Vec<String>> = HashMap::new();
    let mut at = None;
    for line in text.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix(".loc ") {
            let mut words = rest.split_whitespace();
            at = words
                .next()
                .and_then(|file| files.get(file))
                .zip(words.next())
                .map(|(file, line)| format!("{file}:{line}"));
        } else if let Some(at) = &at
            && line.ends_with(';')
            && !line.starts_with('.')
        {
            let lines = found.entry(at.clone()).or_default();
            if !lines.iter().any(|old| shape(old) == shape(line)) {
                lines.push(line.to_string());
            }
        }
    }
    found
}

/// An instruction without the numbers of its registers: unrolled loops print it again with others.
fn shape(line: &str) -> String {
    line.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// The text of a source line, and up to three lines that continue it.
fn source(root: &Path, file: &'static str, line: u32, read: &mut HashMap<&'static str, Vec<String>>) -> Vec<String> {
    let lines = read.entry(file).or_insert_with(|| {
        std::fs::read_to_string(root.join(file))
            .map(|text| text.lines().map(String::from).collect())
            .unwrap_or_default()
    });
    let from = (line as usize).saturating_sub(1).min(lines.len());
    let mut shown: Vec<String> = Vec::new();
    for text in lines[from..].iter().take(4) {
        shown.push(text.clone());
        if text.trim_end().ends_with([';', '{', '}']) {
            break;
        }
    }
    let margin = shown.iter().map(|text| text.len() - text.trim_start().len()).min().unwrap_or(0);
    shown.iter().map(|text| text[margin..].to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_has_spans_with_rust_and_ptx() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let sizes = Sizes { m: 128, n: 256, k: 128, ..Sizes::default() };
        let found = of(root, "gemm-bf16-nt", &sizes).unwrap();
        let tracks: Vec<&str> = found["tracks"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert!(tracks.contains(&"tensor cores") && tracks.contains(&"TMA"), "{tracks:?}");
        let lines = found["lines"].as_array().unwrap();
        let has = |field: &str| lines.iter().filter(|line| !line[field].as_array().unwrap().is_empty()).count();
        assert!(has("rust") == lines.len() && 2 * has("ptx") > lines.len(), "{lines:#?}");
        let spans = found["spans"].as_array().unwrap();
        assert!(spans.iter().any(|span| span[3] == "product") && spans.iter().any(|span| span[4] == 1));
        assert!(of(root, "no-such-kernel", &sizes).is_err());
    }

    #[test]
    fn instructions_belong_to_the_last_location() {
        let text = ".file 1 \"a.rs\"\n.loc 1 7 3\n add.u32 %r1, %r2, 1;\n add.u32 %r3, %r4, 1;\n.loc 1 8 1\n ret;\n";
        let found = ptx_by_line(text);
        assert_eq!(
            (&found["a.rs:7"][..], &found["a.rs:8"][..]),
            (&["add.u32 %r1, %r2, 1;".to_string()][..], &["ret;".to_string()][..])
        );
    }
}
