//! A clock that counts cycles, and the timeline that it draws.
//!
//! CTAs go to the SMs in turn, and those of an SM share its units. A warp issues in order, and does not stop at an
//! instruction whose operands come later: the assembler's order hides up to [`Architecture::window`] cycles. An instruction
//! holds its unit for as long as the unit's rate says, and its results come after the unit's latency. Products and copies
//! queue for the tensor cores and TMA. Caches, bank conflicts and the traffic of other SMs are ignored.

use crate::copy::{Copy, End};
use crate::finding::Line;
use crate::program::Program;
use crate::world::{Cluster, Warp, World};
use fulgurite_ptx::Number;
use fulgurite_ptx::inst::{Arg, Base, Effect, Flow, Op, Reg, Unit};
use std::collections::BTreeMap;
use std::fmt::Write;

/// A row of the picture.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The first warp of a warpgroup: its role, and its index in the role.
    Role(String, u32),
    /// The tensor cores.
    Tensor,
    /// TMA.
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
    /// Shared memory, as threads access it.
    shared: u64,
    /// Cycles of shared memory that threads and copies took, and that products did not make up for yet.
    debt: f64,
    /// Cycle up to which idle time made up for it.
    settled: u64,
    tensor: u64,
    copy: u64,
}

impl Units {
    /// What is left of the debt at a cycle: the time in which the tensor cores rested makes up for it.
    fn debt(&mut self, now: u64) -> f64 {
        let from = self.settled.max(self.tensor);
        self.settled = self.settled.max(now);
        (self.debt - now.saturating_sub(from) as f64).max(0.0)
    }
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
        Track::Copy => "TMA".into(),
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
    ///
    /// A warp issues in order. An instruction whose operands are not there yet does not hold up the next one until it is
    /// [`Architecture::window`] cycles late: so far the assembler's order runs ahead. What others can see (signals, waits,
    /// products, copies) comes after all results of the warp.
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
        // The assembler renames registers instead of moving them.
        if op.inst.name == "mov" {
            let ready = operands_ready(self.program, warp, op);
            results_ready(self.program, warp, op, ready);
            return;
        }
        let units = timeline.units.entry(block % rates.arch.sms).or_default();
        let part = (warp.index % 4) as usize;
        let front = warp.now.max(units.issue[part]);
        units.issue[part] = front + 1;
        let (unit, hold, latency) = rates.costs(op);
        let free = match unit {
            Unit::Shared => &mut units.shared,
            unit => units.parts[part].entry(unit).or_default(),
        };
        let start = front.max(*free);
        *free = start + hold;
        if unit == Unit::Shared {
            units.debt = units.debt(start) + hold as f64;
        }
        let visible = matches!(
            op.inst.effect,
            Effect::Signal | Effect::Wait | Effect::Start | Effect::Write(_) | Effect::Update(_) | Effect::Volatile
        );
        let ready = operands_ready(self.program, warp, op);
        // A store needs its operands; a signal everything that came before it.
        let all = matches!(op.inst.effect, Effect::Signal | Effect::Wait | Effect::Start);
        let started = start.max(ready).max(if all { warp.due } else { 0 });
        let end = started + latency;
        results_ready(self.program, warp, op, end);
        warp.due = warp.due.max(end);
        let now = match visible {
            true => started + 1,
            false => (front + 1).max(started.saturating_sub(rates.window)),
        };
        if let Some(track) = track {
            let line: Line = op.at.into();
            let end = now.max(front + hold);
            // Merge consecutive work of one line into one span.
            let joins = |s: &&mut Period| {
                s.block == block && s.track == track && !s.waits && s.line == line && s.end + 8 >= front
            };
            match timeline.spans.iter_mut().rev().take(16).find(joins) {
                Some(span) => span.end = span.end.max(end),
                None => {
                    let (what, start) = (op.inst.name, front);
                    timeline.spans.push(Period { block, track, start, end, what, waits: false, line });
                }
            }
        }
        warp.now = now;
    }

    /// Computes when a warp continues after a branch.
    pub(crate) fn branch(&mut self, cluster: &Cluster, warp: &mut Warp, cond: usize) {
        let sm = cluster.blocks[warp.rank].index % self.architecture.arch.sms;
        let Some(timeline) = &mut self.timeline else { return };
        let units = timeline.units.entry(sm).or_default();
        let issue = &mut units.issue[(warp.index % 4) as usize];
        warp.now = warp.now.max(*issue).max(warp.regs[cond].ready) + 1;
        *issue = warp.now;
    }

    /// When the results of a product that is issued now are there.
    pub(crate) fn product_time(&mut self, block: u32, what: Multiply, now: u64, pc: u32) -> u64 {
        let (line, rates) = (self.program.lines[pc as usize].into(), self.architecture);
        let Some(timeline) = &mut self.timeline else { return now };
        let units = timeline.units.entry(block % rates.arch.sms).or_default();
        let start = now.max(units.tensor);
        let multiplies = what.flops as f64 / rates.tensor_rate(what.number.name());
        // What threads and copies took of shared memory is made up for while the tensor cores rest or read less than they
        // could.
        let debt = units.debt(start);
        let reads = what.operand_bytes as f64 / rates.shared_bytes;
        let took = multiplies.max(reads);
        units.debt = (debt - (took - reads)).max(0.0);
        let end = start + took.ceil() as u64;
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
        let units = timeline.units.entry(block % rates.arch.sms).or_default();
        let start = now.max(units.copy);
        let end = start + (f64::from(copy.bytes) / rates.copy_bytes).ceil() as u64;
        units.copy = end;
        let [from, to] = [&copy.from, &copy.to].map(|end| matches!(end, End::Shared { .. }));
        units.debt =
            units.debt(now) + f64::from(copy.bytes) / rates.shared_bytes * f64::from(u8::from(from) + u8::from(to));
        let latency = if from && to { rates.peer_latency } else { rates.copy_latency };
        let track = Track::Copy;
        timeline.spans.push(Period { block, track, start, end, what: "copy", waits: false, line });
        end + latency + units.debt as u64
    }
}

/// A product for the tensor cores.
pub(crate) struct Multiply {
    pub number: Number,
    pub flops: u64,
    /// Bytes of its operands in shared memory.
    pub operand_bytes: u64,
}

/// The registers of an argument, and of an address.
fn registers(arg: &Arg) -> &[Reg] {
    match arg {
        Arg::Reg(reg) | Arg::Address(Base::Reg(reg), _) => std::slice::from_ref(reg),
        Arg::List(regs) => regs,
        Arg::Imm(_) | Arg::Address(Base::Param(_), _) | Arg::Word(_) | Arg::Param(_) => &[],
    }
}

/// The cycle at which all operands that an instruction reads are there.
fn operands_ready(program: &Program, warp: &Warp, op: &Op) -> u64 {
    let read = op.inst.operands.iter().zip(&op.args).filter(|(operand, _)| operand.flow != Flow::Out);
    read.flat_map(|(_, arg)| registers(arg)).map(|&reg| warp.regs[program.slot(reg)].ready).max().unwrap_or(0)
}

fn results_ready(program: &Program, warp: &mut Warp, op: &Op, end: u64) {
    let written = op.inst.operands.iter().zip(&op.args).filter(|(operand, _)| operand.flow != Flow::In);
    written.flat_map(|(_, arg)| registers(arg)).for_each(|&reg| warp.regs[program.slot(reg)].ready = end);
}
