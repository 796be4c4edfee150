//! An approximate clock and a timeline: good enough to see a pipeline, not to predict a time.
//!
//! Each CTA has an SM to itself. A warp issues in order. An instruction holds its unit for as long as the unit's rate
//! says, a load holds the warp for a fixed latency, and products and copies queue for the tensor cores and the copy
//! engine. Register dependences, caches and the traffic of other CTAs are ignored.

use crate::copy::Copy;
use crate::counters::warp_product;
use crate::finding::Line;
use crate::world::{Cluster, Warp, World};
use fulgurite_ptx::Number;
use fulgurite_ptx::inst::{Effect, Op, Space, Unit};
use std::collections::BTreeMap;
use std::fmt::Write;

/// A row of the picture.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The first warp of a warpgroup: its role, and its index in the role.
    Role(String, u32),
    /// The tensor cores.
    Tensor,
    /// The copy engine.
    Copy,
}

/// Work or a wait that took some time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Period {
    /// Index of the CTA in the grid.
    pub block: u32,
    /// Row of the picture.
    pub track: Track,
    /// First cycle.
    pub start: u64,
    /// One past the last cycle.
    pub end: u64,
    /// Name of the instruction.
    pub what: &'static str,
    /// Whether this is a wait.
    pub waits: bool,
    /// Rust line of the instruction.
    pub line: Line,
}

/// The timeline of a launch.
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    /// All spans, ordered by their end.
    pub spans: Vec<Period>,
    units: BTreeMap<u32, Units>,
}

/// The cycles at which the units of an SM become free.
#[derive(Debug, Clone, Default)]
struct Units {
    /// For each of the four partitions: its scheduler, and its share of each unit.
    parts: [BTreeMap<Unit, u64>; 4],
    issue: [u64; 4],
    tensor: u64,
    copy: u64,
}

impl Timeline {
    /// One past the last cycle.
    pub fn cycles(&self) -> u64 {
        self.spans.iter().map(|s| s.end).max().unwrap_or(0)
    }

    /// JSON for the trace viewers of Chrome and Perfetto: one process per CTA, one row per track, one nanosecond per
    /// cycle. Viewers want the spans of a row nested or apart, so a span ends where the next one begins.
    pub fn chrome(&self) -> String {
        let tracks = self.tracks();
        let mut out = String::from("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n");
        for (i, (block, track)) in tracks.iter().enumerate() {
            let name = track_name(track);
            if i == 0 || tracks[i - 1].0 != *block {
                let _ = writeln!(
                    out,
                    "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{block},\"args\":{{\"name\":\"CTA {block}\"}}}},"
                );
            }
            let _ = writeln!(
                out,
                "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{block},\"tid\":{i},\"args\":{{\"name\":\"{name}\"}}}},"
            );
        }
        let mut spans: Vec<(usize, &Period)> = self
            .spans
            .iter()
            .map(|span| {
                let same = |(block, track): &(u32, &Track)| (*block, *track) == (span.block, &span.track);
                (tracks.iter().position(same).unwrap_or(0), span)
            })
            .collect();
        spans.sort_by_key(|(tid, span)| (*tid, span.start));
        for (n, (tid, span)) in spans.iter().enumerate() {
            let next = spans.get(n + 1).filter(|(other, _)| other == tid);
            let end = next.map_or(span.end, |(_, next)| span.end.min(next.start));
            let comma = if n + 1 == spans.len() { "" } else { "," };
            let kind = if span.waits { "wait: " } else { "" };
            let _ = writeln!(
                out,
                "{{\"ph\":\"X\",\"name\":\"{kind}{}\",\"pid\":{},\"tid\":{tid},\"ts\":{},\"dur\":{},\"args\":{{\"line\":\"{}\"}}}}{comma}",
                span.what,
                span.block,
                span.start as f64 / 1e3,
                (end - span.start) as f64 / 1e3,
                span.line
            );
        }
        out.push_str("]}\n");
        out
    }

    fn tracks(&self) -> Vec<(u32, &Track)> {
        let mut all: Vec<(u32, &Track)> = self.spans.iter().map(|s| (s.block, &s.track)).collect();
        all.sort();
        all.dedup();
        all
    }

    /// An SVG picture of one CTA: one row per track, work in colour, waits pale.
    pub fn svg(&self, block: u32) -> String {
        const WIDTH: f64 = 1200.0;
        const LEFT: f64 = 130.0;
        const ROW: f64 = 26.0;
        let tracks: Vec<&Track> = self.tracks().into_iter().filter(|(b, _)| *b == block).map(|(_, t)| t).collect();
        let cycles = self.spans.iter().filter(|s| s.block == block).map(|s| s.end).max().unwrap_or(1).max(1);
        let scale = (WIDTH - LEFT) / cycles as f64;
        let height = ROW * (tracks.len() as f64 + 1.5);
        let mut out = String::new();
        let _ = writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">"
        );
        for (i, track) in tracks.iter().enumerate() {
            let y = ROW * i as f64 + 4.0;
            let _ = writeln!(out, "<text x=\"4\" y=\"{}\">{}</text>", y + 15.0, track_name(track));
            for span in self.spans.iter().filter(|s| s.block == block && s.track == **track) {
                let (x, w) = (LEFT + span.start as f64 * scale, ((span.end - span.start) as f64 * scale).max(0.4));
                let colour = match (span.waits, &span.track) {
                    (true, _) => "#e4e4e4",
                    (_, Track::Tensor) => "#3a7d44",
                    (_, Track::Copy) => "#2b6cb0",
                    (_, Track::Role(..)) => "#c05621",
                };
                let _ = writeln!(
                    out,
                    "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{w:.1}\" height=\"{}\" fill=\"{colour}\"><title>{} {} ({} cycles)</title></rect>",
                    ROW - 6.0,
                    span.what,
                    span.line,
                    span.end - span.start
                );
            }
        }
        let y = ROW * tracks.len() as f64 + 20.0;
        let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"{y}\">0</text>");
        let _ = writeln!(out, "<text x=\"{WIDTH}\" y=\"{y}\" text-anchor=\"end\">{cycles} cycles (approximate)</text>");
        out.push_str("</svg>\n");
        out
    }
}

fn track_name(track: &Track) -> String {
    match track {
        Track::Role(role, number) if role.is_empty() => format!("threads {number}"),
        Track::Role(role, number) => format!("{role} {number}"),
        Track::Tensor => "tensor cores".into(),
        Track::Copy => "copy engine".into(),
    }
}

impl World<'_> {
    /// The row of a warp: only the first of each four warps of a role has one.
    fn track(&self, warp: &Warp) -> Option<Track> {
        let roles = &self.program.kernel.roles;
        let (name, first) = roles.get(warp.role).map_or((String::new(), 0), |r| (r.name.clone(), r.first_warp));
        (warp.index - first).is_multiple_of(4).then(|| Track::Role(name, (warp.index - first) / 4))
    }

    /// Computes when a warp can issue an instruction, and when it continues.
    pub(crate) fn issue(&mut self, cluster: &Cluster, warp: &mut Warp, op: &Op) {
        let block = cluster.blocks[warp.rank].index;
        let (track, rates) = (self.track(warp), self.architecture);
        let Some(timeline) = &mut self.timeline else { return };
        if let (Some((since, pc)), Some(track)) = (warp.blocked.take(), &track)
            && warp.now > since
        {
            let (start, end, line) = (since, warp.now, self.program.lines[pc as usize].into());
            let what = "wait";
            timeline.spans.push(Period { block, track: track.clone(), start, end, what, waits: true, line });
        }
        let units = timeline.units.entry(block).or_default();
        let part = (warp.index % 4) as usize;
        // A quarter of the unit's lanes serves a quarter of the warps.
        let hold = match warp_product(op) {
            Some((number, flops)) => (flops as f64 / (rates.tensor_rate(number) / 4.0)).ceil() as u64,
            None => rates.lanes(op.inst.unit).map_or(1, |lanes| (32.0 / (lanes / 4.0)).ceil() as u64),
        };
        let free = units.parts[part].entry(op.inst.unit).or_default();
        let start = warp.now.max(*free).max(units.issue[part]);
        *free = start + hold;
        units.issue[part] = start + 1;
        let latency = match op.inst.effect {
            Effect::Read(Space::Shared | Space::Cluster) => rates.shared_latency,
            Effect::Read(Space::Global) | Effect::Update(_) => rates.global_latency,
            _ => 1,
        };
        let end = start + latency;
        if let Some(track) = track {
            let line: Line = op.at.into();
            // Merge consecutive work of one line into one span.
            let joins = |s: &&mut Period| {
                s.block == block && s.track == track && !s.waits && s.line == line && s.end + 8 >= start
            };
            match timeline.spans.iter_mut().rev().take(16).find(joins) {
                Some(span) => span.end = span.end.max(end),
                None => {
                    let what = op.inst.name;
                    timeline.spans.push(Period { block, track, start, end, what, waits: false, line });
                }
            }
        }
        warp.now = end;
    }

    /// The end of a product that starts now.
    pub(crate) fn product_time(&mut self, block: u32, number: Number, flops: u64, now: u64, pc: u32) -> u64 {
        let (line, rates) = (self.program.lines[pc as usize].into(), self.architecture);
        let Some(timeline) = &mut self.timeline else { return now };
        let units = timeline.units.entry(block).or_default();
        let start = now.max(units.tensor);
        let end = start + (flops as f64 / rates.tensor_rate(number.name())).ceil() as u64;
        units.tensor = end;
        let track = Track::Tensor;
        timeline.spans.push(Period { block, track, start, end, what: "product", waits: false, line });
        end + rates.tensor_latency
    }

    /// The time at which a copy that reads now has written.
    pub(crate) fn copy_time(&mut self, copy: &Copy) -> u64 {
        let now = self.now;
        let (line, rates) = (self.program.lines[copy.issued.pc as usize].into(), self.architecture);
        let Some(timeline) = &mut self.timeline else { return now };
        let block = copy.issued.block;
        let units = timeline.units.entry(block).or_default();
        let start = now.max(units.copy);
        let end = start + (f64::from(copy.bytes) / rates.shared_bytes).ceil() as u64;
        units.copy = end;
        let track = Track::Copy;
        timeline.spans.push(Period { block, track, start, end, what: "copy", waits: false, line });
        end + rates.copy_latency
    }
}
