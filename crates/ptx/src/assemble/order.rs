//! Checks that waits for `wgmma` and signals that publish part of a result stay where the kernel put them.
//!
//! The assembler moves `wgmma.wait_group` like any other instruction. If it hoists a wait above exponentials that were
//! meant to overlap the products, the result stays correct, but the kernel is slow and no message says so. This module
//! reads the printed text and the machine code as control-flow graphs and compares them. If an exponential precedes a
//! wait in the text, with no product started between them, it must not follow that wait in the machine code.
//!
//! A role that publishes part of a result computes the rest afterwards. The assembler may compute the rest first, because
//! a signal writes no register that an exponential reads. So the exponentials that follow such a signal in the text, up to
//! the next wait or signal, are counted where they precede it in the machine code. The assembler takes a few of them in
//! advance to fill the time that a store needs. More than a quarter means that the order is lost.
//!
//! Every reported wait was moved or dropped. The check ignores waits and exponentials in cold code, and all arithmetic
//! other than exponentials.

use std::collections::{BTreeSet, HashMap};

/// A wait that the assembler moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Moved {
    /// Line of the wait in the text.
    pub wait: u32,
    /// Lines of the exponentials that the wait overtook; if the wait was dropped, of all exponentials before it.
    pub behind: Vec<u32>,
    /// Whether the wait is absent from the machine code.
    pub dropped: bool,
}

/// A signal that the assembler moved behind exponentials of what follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Late {
    /// Line of the signal in the text.
    pub signal: u32,
    /// Lines of the exponentials that overtook the signal.
    pub ahead: Vec<u32>,
    /// Number of exponentials between the signal and the next wait or signal in the text.
    pub after: usize,
}

/// The share of the exponentials behind a signal that may overtake it: one in this number.
const TOLERATED: usize = 4;

/// The kinds of instruction that the check distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Exponential,
    Product,
    Wait,
    /// An arrival at an mbarrier.
    Signal,
    /// A wait on an mbarrier.
    Await,
    Other,
}

/// The instructions at which a search for exponentials around a `wgmma` wait ends, and around a signal.
const PRODUCTS: &[Kind] = &[Kind::Product];
const SIGNALS: &[Kind] = &[Kind::Signal, Kind::Await];

/// An instruction and its successors in the control flow.
struct Node {
    kind: Kind,
    /// Line of the instruction in the text.
    line: u32,
    next: Vec<usize>,
}

/// Instructions in program order.
struct Graph(Vec<Node>);

/// Branch targets of an instruction besides the next one, and whether it may also fall through.
struct Jump<'a> {
    to: Vec<&'a str>,
    falls_through: bool,
}

impl Graph {
    fn link(instructions: Vec<(Kind, u32, Jump<'_>)>, labels: &HashMap<&str, usize>) -> Graph {
        let count = instructions.len();
        let link = |(at, (kind, line, jump)): (usize, (Kind, u32, Jump<'_>))| {
            let after = Some(at + 1).filter(|next| jump.falls_through && *next < count);
            let to = jump.to.iter().filter_map(|label| labels.get(label).copied()).filter(|to| *to < count);
            Node { kind, line, next: after.into_iter().chain(to).collect() }
        };
        Graph(instructions.into_iter().enumerate().map(link).collect())
    }

    /// Lines of the exponentials reachable from node `from` before one of the kinds `ends`.
    fn exponentials_after(&self, from: usize, ends: &[Kind]) -> BTreeSet<u32> {
        let (mut seen, mut open) = (BTreeSet::new(), self.0[from].next.clone());
        while let Some(at) = open.pop() {
            if !ends.contains(&self.0[at].kind) && seen.insert(at) {
                open.extend(&self.0[at].next);
            }
        }
        let lines = seen.into_iter().filter(|&at| self.0[at].kind == Kind::Exponential).map(|at| self.0[at].line);
        lines.collect()
    }

    /// Lines of the exponentials from which node `to` is reachable before one of the kinds `starts`.
    fn exponentials_before(&self, to: usize, starts: &[Kind]) -> BTreeSet<u32> {
        let mut back = vec![Vec::new(); self.0.len()];
        self.0.iter().enumerate().for_each(|(at, node)| node.next.iter().for_each(|&next| back[next].push(at)));
        let reversed = back.into_iter().zip(&self.0).map(|(next, node)| Node { next, ..*node }).collect();
        Graph(reversed).exponentials_after(to, starts)
    }

    /// The nodes of each instruction of a kind, by line: the assembler may have duplicated one.
    fn all(&self, kind: Kind) -> HashMap<u32, Vec<usize>> {
        let mut all = HashMap::<u32, Vec<usize>>::new();
        for (at, node) in self.0.iter().enumerate().filter(|(_, node)| node.kind == kind) {
            all.entry(node.line).or_default().push(at);
        }
        all
    }
}

/// The graph of the printed text, up to the cold code.
fn text(ptx: &str) -> Graph {
    let (mut instructions, mut labels) = (Vec::new(), HashMap::new());
    for (line, words) in (1..).zip(ptx.lines()) {
        let words = words.trim();
        if let Some(label) = words.strip_suffix(':') {
            labels.insert(label, instructions.len());
            continue;
        }
        let (guard, op) = match words.strip_prefix('@') {
            Some(rest) => rest.split_once(' ').map_or((true, rest), |(_, op)| (true, op)),
            None => (false, words),
        };
        let kind = match op {
            op if op.starts_with("ex2.") => Kind::Exponential,
            op if op.starts_with("wgmma.mma_async") => Kind::Product,
            op if op.starts_with("wgmma.wait_group") => Kind::Wait,
            op if op.starts_with("mbarrier.arrive") => Kind::Signal,
            op if op.starts_with("mbarrier.try_wait") => Kind::Await,
            _ => Kind::Other,
        };
        let branch = op.starts_with("bra").then(|| op.trim_end_matches(';').rsplit(' ').next()).flatten();
        let ends = op.starts_with("ret;");
        let jump = Jump { to: branch.into_iter().collect(), falls_through: guard || (branch.is_none() && !ends) };
        instructions.push((kind, line, jump));
        if ends {
            break;
        }
    }
    Graph::link(instructions, &labels)
}

/// The graph of the disassembly. Each instruction carries its line in the printed text.
fn machine_code(sass: &str) -> Graph {
    let (mut instructions, mut labels, mut meets) = (Vec::new(), HashMap::new(), HashMap::<&str, Vec<&str>>::new());
    let mut line = 0;
    for words in sass.lines() {
        let words = words.trim();
        if let Some(at) = words.strip_prefix("//## File ") {
            line = super::report::line_number(at).unwrap_or(0);
            continue;
        }
        if let Some(label) = words.strip_suffix(':') {
            labels.insert(label, instructions.len());
            continue;
        }
        let Some((_, code)) = words.strip_prefix("/*").and_then(|rest| rest.split_once("*/")) else { continue };
        let code = code.trim();
        let (guard, code) = match code.strip_prefix('@') {
            Some(rest) => rest.split_once(char::is_whitespace).map_or((true, rest), |(_, code)| (true, code.trim())),
            None => (false, code),
        };
        let (op, operands) = code.split_once(char::is_whitespace).unwrap_or((code, ""));
        let target =
            operands.split_once("`(").and_then(|(before, rest)| Some((before.trim(), rest.split_once(')')?.0)));
        let mut jump = Jump { to: Vec::new(), falls_through: true };
        let mut kind = Kind::Other;
        match op.split('.').next().unwrap_or(op) {
            "MUFU" if op.starts_with("MUFU.EX2") => kind = Kind::Exponential,
            "HGMMA" => kind = Kind::Product,
            "WARPGROUP" if op.starts_with("WARPGROUP.DEPBAR") => kind = Kind::Wait,
            "SYNCS" if op.starts_with("SYNCS.ARRIVE") => kind = Kind::Signal,
            "SYNCS" if op.starts_with("SYNCS.PHASECHK") => kind = Kind::Await,
            "BRA" | "JMP" => {
                let (before, label) = target.unwrap_or_default();
                jump = Jump { to: vec![label], falls_through: guard || !before.is_empty() };
            }
            // BSSY names the label at which diverged lanes reconverge; BSYNC jumps there.
            "BSSY" => {
                if let Some((barrier, label)) = target {
                    meets.entry(barrier.trim_end_matches(',')).or_default().push(label);
                }
            }
            "BSYNC" => {
                let barrier = operands.trim_end_matches([';', ' ']);
                jump.to = meets.get(barrier).and_then(|all| all.last()).copied().into_iter().collect();
            }
            "EXIT" | "RET" | "BRX" | "JMX" => jump.falls_through = guard,
            _ => {}
        }
        instructions.push((kind, line, jump));
    }
    Graph::link(instructions, &labels)
}

/// Whether the order of waits and exponentials can have changed at all. If not, the disassembler is not needed.
pub(super) fn is_at_stake(ptx: &str) -> bool {
    let text = text(ptx);
    text.all(Kind::Wait).into_values().flatten().any(|wait| !text.exponentials_before(wait, PRODUCTS).is_empty())
}

/// Waits that were moved or dropped, in text order.
pub(super) fn moved(ptx: &str, sass: &str) -> Vec<Moved> {
    let (text, code) = (text(ptx), machine_code(sass));
    let there = code.all(Kind::Wait);
    let mut moved = Vec::new();
    for (line, at) in text.all(Kind::Wait) {
        let before: BTreeSet<u32> = at.iter().flat_map(|&at| text.exponentials_before(at, PRODUCTS)).collect();
        let after: BTreeSet<u32> = at.iter().flat_map(|&at| text.exponentials_after(at, PRODUCTS)).collect();
        let before: BTreeSet<u32> = before.difference(&after).copied().collect();
        if before.is_empty() {
            continue;
        }
        let Some(places) = there.get(&line) else {
            moved.push(Moved { wait: line, behind: before.into_iter().collect(), dropped: true });
            continue;
        };
        let found: BTreeSet<u32> = places.iter().flat_map(|&at| code.exponentials_after(at, PRODUCTS)).collect();
        let behind: Vec<u32> = before.intersection(&found).copied().collect();
        if !behind.is_empty() {
            moved.push(Moved { wait: line, behind, dropped: false });
        }
    }
    moved.sort_by_key(|moved| moved.wait);
    moved
}

/// Signals that exponentials of what follows overtook, in text order. `publishes` tells which lines of the text publish part
/// of a result.
pub(super) fn late(ptx: &str, sass: &str, publishes: impl Fn(u32) -> bool) -> Vec<Late> {
    let (text, code) = (text(ptx), machine_code(sass));
    let there = code.all(Kind::Signal);
    let mut late = Vec::new();
    for (signal, at) in text.all(Kind::Signal).into_iter().filter(|&(line, _)| publishes(line)) {
        let after: BTreeSet<u32> = at.iter().flat_map(|&at| text.exponentials_after(at, SIGNALS)).collect();
        let places = there.get(&signal).map_or(&[][..], Vec::as_slice);
        let before: BTreeSet<u32> = places.iter().flat_map(|&at| code.exponentials_before(at, SIGNALS)).collect();
        let ahead: Vec<u32> = after.intersection(&before).copied().collect();
        if TOLERATED * ahead.len() > after.len() {
            late.push(Late { signal, ahead, after: after.len() });
        }
    }
    late.sort_by_key(|late| late.signal);
    late
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines 3 and 5 are exponentials, line 6 is the wait. The cold code after the end has its own.
    const PTX: &str = "\
$LOOP_1:
  wgmma.mma_async.sync.aligned.m64n8k16 {%f0};
  ex2.approx.ftz.f32 %f1, %f1;
  @%p1 bra.uni $COLD_2;
$BACK_3:
  ex2.approx.ftz.f32 %f2, %f2;
  wgmma.wait_group.sync.aligned 0;
  @%p2 bra.uni $LOOP_1;
  ret;
$COLD_2:
  ex2.approx.ftz.f32 %f3, %f3;
  wgmma.wait_group.sync.aligned 0;
  bra.uni $BACK_3;
";

    /// Disassembler output; each pair is a line of the text and an instruction.
    fn sass(lines: &[(u32, &str)]) -> String {
        let mut text = String::from(".text.k:\n");
        for (at, (line, code)) in lines.iter().enumerate() {
            text += &match *line {
                0 => format!("{code}\n"),
                _ => {
                    format!("\t//## File \".nv_debug_ptx_txt\", line {line}\n        /*{:04x}*/    {code} ;\n", 16 * at)
                }
            };
        }
        text
    }

    #[test]
    fn the_order_of_the_text_is_no_fault() {
        let straight = sass(&[
            (0, ".L_x_0:"),
            (2, "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT, gsb0"),
            (3, "MUFU.EX2 R1, R1"),
            (4, "@P1 BRA `(.L_x_2)"),
            (0, ".L_x_1:"),
            (6, "MUFU.EX2 R2, R2"),
            (7, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
            (8, "@P2 BRA `(.L_x_0)"),
            (9, "EXIT"),
            // The wait in cold code was moved up, which costs nothing.
            (0, ".L_x_2:"),
            (12, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
            (11, "MUFU.EX2 R3, R3"),
            (13, "BRA `(.L_x_1)"),
        ]);
        assert!(is_at_stake(PTX));
        assert_eq!(moved(PTX, &straight), []);
    }

    #[test]
    fn a_wait_before_its_exponentials_is_found() {
        let hoisted = sass(&[
            (0, ".L_x_0:"),
            (2, "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT, gsb0"),
            (3, "MUFU.EX2 R1, R1"),
            (7, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
            (6, "MUFU.EX2 R2, R2"),
            (8, "@P2 BRA `(.L_x_0)"),
            (9, "EXIT"),
        ]);
        assert_eq!(moved(PTX, &hoisted), [Moved { wait: 7, behind: vec![6], dropped: false }]);
    }

    #[test]
    fn a_wait_whose_exponentials_sank_into_another_block_is_found() {
        let sunk = sass(&[
            (0, ".L_x_0:"),
            (2, "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT, gsb0"),
            (3, "BSSY B0, `(.L_x_4)"),
            (7, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
            (7, "BSYNC B0"),
            (9, "EXIT"),
            (0, ".L_x_4:"),
            (3, "MUFU.EX2 R1, R1"),
            (6, "MUFU.EX2 R2, R2"),
            (8, "@P2 BRA `(.L_x_0)"),
            (9, "EXIT"),
        ]);
        assert_eq!(moved(PTX, &sunk), [Moved { wait: 7, behind: vec![3, 6], dropped: false }]);
    }

    #[test]
    fn a_wait_that_is_gone_is_found() {
        let without = sass(&[(2, "HGMMA.64x8x16.F32.BF16 R24"), (3, "MUFU.EX2 R1, R1"), (9, "EXIT")]);
        assert_eq!(moved(PTX, &without), [Moved { wait: 7, behind: vec![3, 6], dropped: true }]);
    }

    /// Lines 3, 4 and 5 are exponentials of a first part, line 7 publishes it, lines 8 to 11 are the rest.
    const PARTS: &str = "\
$LOOP:
  mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r0], %r1;
  ex2.approx.ftz.f32 %f1, %f1;
  ex2.approx.ftz.f32 %f2, %f2;
  ex2.approx.ftz.f32 %f3, %f3;
  @%p1 bra.uni $COLD;
  mbarrier.arrive.shared::cta.b64 _, [%r2];
  ex2.approx.ftz.f32 %f4, %f4;
  ex2.approx.ftz.f32 %f5, %f5;
  ex2.approx.ftz.f32 %f6, %f6;
  ex2.approx.ftz.f32 %f7, %f7;
  mbarrier.arrive.shared::cta.b64 _, [%r3];
  @%p2 bra.uni $LOOP;
  ret;
";

    /// The machine code of `PARTS` with `early` of the last four exponentials before the first signal.
    fn parts(early: u32) -> String {
        let exponential = |line| (line, "MUFU.EX2 R1, R1");
        let mut lines = vec![(0, ".L_x_0:"), (2, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2")];
        lines.extend((3..6).chain(8..8 + early).map(exponential));
        lines.push((7, "@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR5], RZ"));
        lines.extend((8 + early..12).map(exponential));
        lines.extend([(12, "@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6], RZ"), (13, "@P2 BRA `(.L_x_0)"), (14, "EXIT")]);
        sass(&lines)
    }

    #[test]
    fn a_signal_behind_the_rest_of_a_result_is_found() {
        let publishes = |line| [7, 12].contains(&line);
        for early in [0, 1] {
            assert_eq!(late(PARTS, &parts(early), publishes), [], "{early}");
        }
        assert_eq!(late(PARTS, &parts(2), publishes), [Late { signal: 7, ahead: vec![8, 9], after: 4 }]);
        assert_eq!(late(PARTS, &parts(4), publishes), [Late { signal: 7, ahead: vec![8, 9, 10, 11], after: 4 }]);
        // Signals that publish nothing may come at any time.
        assert_eq!(late(PARTS, &parts(4), |_| false), []);
    }

    #[test]
    fn exponentials_of_the_next_round_are_not_before() {
        // Every iteration starts with a product, so no exponential precedes the wait and no order can change.
        let text = "$L:\n  wgmma.mma_async.x {%f0};\n  wgmma.wait_group.sync.aligned 0;\n  ex2.approx.ftz.f32 %f1, %f1;\n  bra.uni $L;\n  ret;\n";
        assert!(!is_at_stake(text));
    }
}
