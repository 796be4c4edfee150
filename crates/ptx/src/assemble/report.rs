//! Parses the assembler's output.

use super::AssembleError;
use super::order::{Late, Moved};
use crate::kernel::Kernel;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::time::Duration;

/// A line of Rust source that built an instruction.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RustLine {
    /// File name, as the Rust compiler gives it.
    pub file: String,
    /// Line number, from 1.
    pub line: u32,
}

impl From<&std::panic::Location<'_>> for RustLine {
    fn from(at: &std::panic::Location<'_>) -> Self {
        RustLine { file: at.file().into(), line: at.line() }
    }
}

impl fmt::Display for RustLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// Maps each line of a printed kernel to the Rust line that built it, from the `.loc` lines of the text.
///
/// ```
/// use fulgurite_ptx::assemble::LineMap;
///
/// let map = LineMap::of(".file 1 \"a.rs\"\n{\n  .loc 1 7 3\n  ret;\n}\n");
/// assert_eq!(map.rust(4).unwrap().to_string(), "a.rs:7");
/// assert_eq!(map.rust(2), None);
/// ```
#[derive(Debug, Clone, Default)]
pub struct LineMap {
    files: HashMap<u32, String>,
    /// Line of the text, file number and source line; ascending.
    lines: Vec<(u32, u32, u32)>,
}

impl LineMap {
    /// Reads the map from a printed kernel.
    pub fn of(text: &str) -> LineMap {
        let mut map = LineMap::default();
        for (number, line) in (1..).zip(text.lines()) {
            let mut words = line.split_whitespace();
            match words.next() {
                Some(".file") => {
                    let file = words.next().and_then(|word| word.parse().ok());
                    let name = line.split('"').nth(1);
                    map.files.extend(file.zip(name.map(String::from)));
                }
                Some(".loc") => {
                    let mut next = || words.next().and_then(|word| word.parse().ok());
                    if let (Some(file), Some(line)) = (next(), next()) {
                        map.lines.push((number, file, line));
                    }
                }
                _ => {}
            }
        }
        map
    }

    /// The Rust line of a line of the text (from 1); `None` before the first instruction.
    pub fn rust(&self, line: u32) -> Option<RustLine> {
        let after = self.lines.partition_point(|&(number, ..)| number <= line);
        let &(_, file, line) = self.lines[..after].last()?;
        Some(RustLine { file: self.files.get(&file)?.clone(), line })
    }
}

/// Severity that the assembler gives a message. It reports lost instructions as "info".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Information only; includes lost and serialised instructions.
    Info,
    /// A warning; code was made.
    Warning,
    /// No code was made.
    Error,
}

impl Severity {
    /// The assembler's name of the severity.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// A message of the assembler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Severity that the assembler gives it.
    pub severity: Severity,
    /// Message number, such as `C7510`, if it has one.
    pub code: Option<String>,
    /// Message text.
    pub text: String,
    /// Line of the printed kernel that the message names.
    pub ptx_line: Option<u32>,
    /// Rust line that printed that line.
    pub at: Option<RustLine>,
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = &self.at {
            write!(f, "{at}: ")?;
        }
        match &self.code {
            Some(code) => write!(f, "{code} {}", self.text),
            None => write!(f, "{} {}", self.severity.name(), self.text),
        }
    }
}

impl Message {
    /// Every message in the assembler's output, without statistics.
    pub(super) fn all(log: &str, map: &LineMap) -> Vec<Message> {
        log.lines().filter_map(|line| Message::read(line, map)).collect()
    }

    /// Reads `ptxas info : (C7508) text` and `ptxas file, line 17; error : text`.
    fn read(line: &str, map: &LineMap) -> Option<Message> {
        let (head, text) = line.strip_prefix("ptxas ")?.split_once(" : ")?;
        let (place, kind) = match head.rsplit_once(';') {
            Some((place, kind)) => (Some(place), kind),
            None => (None, head),
        };
        let severity = match kind.trim() {
            "info" => Severity::Info,
            "warning" => Severity::Warning,
            "error" | "fatal" => Severity::Error,
            _ => return None,
        };
        let text = text.trim();
        let coded = text.strip_prefix('(').and_then(|rest| rest.split_once(')'));
        let coded = coded.filter(|(code, _)| is_code(code));
        let (code, text) = match coded {
            Some((code, text)) => (Some(code.to_string()), text.trim()),
            None => (None, text),
        };
        if severity == Severity::Info && code.is_none() && !text.contains(LOSS) {
            return None;
        }
        let ptx_line = place.and_then(line_number).or_else(|| line_number(text));
        let at = ptx_line.and_then(|line| map.rust(line));
        Some(Message { severity, code, text: text.to_string(), ptx_line, at })
    }

    /// Whether the message says that the machine code differs from the kernel: instructions serialised, dropped or
    /// inserted.
    pub fn is_fault(&self) -> bool {
        let changed = self.code.as_ref().is_some_and(|code| code.starts_with("C75"));
        changed || self.severity == Severity::Error || self.text.contains(LOSS)
    }
}

/// Start of the assembler's messages about slow code.
const LOSS: &str = "Potential Performance Loss";

fn is_code(word: &str) -> bool {
    word.strip_prefix('C').is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// The number after the last "line" of a text.
pub(super) fn line_number(text: &str) -> Option<u32> {
    let (_, after) = text.rsplit_once("line ")?;
    let digits = after.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

/// The reason why an assembled kernel must not be used as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The kernel spills registers to memory.
    Spills {
        /// Bytes that each thread writes.
        stores_bytes: u32,
        /// Bytes that each thread reads back.
        loads_bytes: u32,
        /// Rust lines of the spilling instructions, if a disassembler was found.
        at: Vec<RustLine>,
    },
    /// The kernel uses local memory.
    LocalMemory {
        /// Bytes of local memory per thread.
        bytes: u32,
        /// Rust lines of the instructions that use it, if a disassembler was found.
        at: Vec<RustLine>,
    },
    /// A message about lost, serialised or inserted instructions.
    Remark(Message),
    /// A `wgmma` wait precedes exponentials that were meant to overlap the products.
    MovedWait(MovedWait),
    /// A signal that publishes part of a result follows exponentials of the rest.
    LatePublish(LatePublish),
}

/// A `wgmma` wait that the assembler hoisted above exponentials, or dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovedWait {
    /// Rust line of the wait.
    pub at: Option<RustLine>,
    /// Whether the wait is absent from the machine code.
    pub dropped: bool,
    /// Number of exponentials that should precede the wait and do not.
    pub exponentials: usize,
    /// Rust line of the first such exponential.
    pub first: Option<RustLine>,
}

impl MovedWait {
    pub(super) fn all(moved: &[Moved], map: &LineMap) -> Vec<MovedWait> {
        let read = |moved: &Moved| MovedWait {
            at: map.rust(moved.wait),
            dropped: moved.dropped,
            exponentials: moved.behind.len(),
            first: moved.behind.first().and_then(|&line| map.rust(line)),
        };
        moved.iter().map(read).collect()
    }
}

/// A signal that publishes part of a result, and that the assembler moved behind exponentials of the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LatePublish {
    /// Name of the role that signals.
    pub role: String,
    /// Rust line of the signal.
    pub at: RustLine,
    /// Number of exponentials that should follow the signal.
    pub exponentials: usize,
    /// Number of those exponentials that precede the signal.
    pub early: usize,
}

impl LatePublish {
    pub(super) fn all(kernel: &Kernel, text: &str, sass: &str, map: &LineMap) -> Vec<LatePublish> {
        let publish = |line: u32| {
            let at = map.rust(line)?;
            kernel.publishes.iter().find(|publish| RustLine::from(publish.at) == at)
        };
        let late = super::order::late(text, sass, |line| publish(line).is_some());
        let read = |late: Late| {
            let found = publish(late.signal)?;
            let (role, at) = (found.role.clone(), found.at.into());
            Some(LatePublish { role, at, exponentials: late.after, early: late.ahead.len() })
        };
        late.into_iter().filter_map(read).collect()
    }
}

impl fmt::Display for LatePublish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: role `{}` publishes part of a result too late: {} of the {} exponentials that follow come before the \
             signal; put a branch between them that depends on the results before, or a wall",
            self.at, self.role, self.early, self.exponentials
        )
    }
}

impl fmt::Display for MovedWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |at: &Option<RustLine>| at.as_ref().map_or("an unknown line".into(), ToString::to_string);
        let what = if self.dropped { "dropped" } else { "moved up" };
        write!(
            f,
            "{}: the wait for products was {what}, {} exponentials should come before it and do not, the first of {}: they \
             do not run beside the products; wait by `wait_products_after` with what depends on them, or by \
             `wait_products_anywhere` where it makes no difference",
            place(&self.at),
            self.exponentials,
            place(&self.first)
        )
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = |at: &[RustLine]| {
            let shown = at.iter().take(4).map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let more = if at.len() > 4 { format!(" and {} more", at.len() - 4) } else { String::new() };
            if at.is_empty() { shown } else { format!(" at {shown}{more}") }
        };
        match self {
            Fault::Spills { stores_bytes, loads_bytes, at } => write!(
                f,
                "{stores_bytes} bytes of registers spilled and {loads_bytes} read back{}; keep fewer values alive, or give the role more registers",
                places(at)
            ),
            Fault::LocalMemory { bytes, at } => {
                write!(f, "{bytes} bytes of local memory a thread{}; index registers by constants only", places(at))
            }
            Fault::Remark(message) => message.fmt(f),
            Fault::MovedWait(moved) => moved.fmt(f),
            Fault::LatePublish(late) => late.fmt(f),
        }
    }
}

/// The assembler's report on a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Registers per thread; if roles change them, the count at entry.
    pub registers: u32,
    /// Bytes of spilled registers that each thread writes.
    pub spill_stores_bytes: u32,
    /// Bytes of spilled registers that each thread reads back.
    pub spill_loads_bytes: u32,
    /// Local memory of each thread in bytes, including spilled registers.
    pub stack_bytes: u32,
    /// Shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
    /// Number of named barriers.
    pub barriers: u32,
    /// Time that the assembler took, by its own clock.
    pub time: Duration,
    /// Messages, in the assembler's order.
    pub messages: Vec<Message>,
    /// Rust lines of instructions that use local memory; empty if no disassembler was found.
    pub local_lines: Vec<RustLine>,
    /// `wgmma` waits that precede exponentials meant to overlap the products; empty if no disassembler was found.
    pub moved_waits: Vec<MovedWait>,
    /// Signals of part of a result that follow exponentials of the rest; empty if no disassembler was found.
    pub late_publishes: Vec<LatePublish>,
    /// Machine code, an ELF file that the driver loads.
    pub cubin: Vec<u8>,
}

impl Report {
    pub(super) fn read(kernel: &Kernel, log: &str, map: &LineMap, cubin: Vec<u8>) -> Result<Report, AssembleError> {
        let missing = |what: &str| AssembleError::Unreadable {
            tool: "ptxas",
            kernel: kernel.name.clone(),
            what: format!("no {what} in what it said: `{}`", log.trim()),
        };
        let number = |unit: &str| before(log, unit);
        let time = log.lines().find_map(|line| line.split_once("Compile time = "));
        let milliseconds = time.and_then(|(_, rest)| rest.strip_suffix(" ms")?.trim().parse::<f64>().ok());
        Ok(Report {
            registers: number("registers").ok_or_else(|| missing("registers"))?,
            spill_stores_bytes: number("bytes spill stores").ok_or_else(|| missing("spills"))?,
            spill_loads_bytes: number("bytes spill loads").ok_or_else(|| missing("spills"))?,
            stack_bytes: number("bytes stack frame").ok_or_else(|| missing("stack frame"))?,
            // The text declares no dynamic shared memory; memory that it does declare comes on top.
            shared_bytes: kernel.shared_bytes + number("bytes smem").unwrap_or(0),
            barriers: number("barriers").unwrap_or(0),
            time: Duration::try_from_secs_f64(milliseconds.unwrap_or(0.0) / 1e3).unwrap_or_default(),
            messages: Message::all(log, map),
            local_lines: Vec::new(),
            moved_waits: Vec::new(),
            late_publishes: Vec::new(),
            cubin,
        })
    }

    /// Whether the machine code does what the kernel says: no spills, no local memory, no instruction lost, inserted or
    /// serialised, no wait hoisted above work that was meant to overlap products, no signal held back by work that should
    /// follow it. Other warnings are in
    /// [`messages`](Report::messages) and are not faults.
    pub fn verdict(&self) -> Result<(), Vec<Fault>> {
        let mut faults = Vec::new();
        let at = || self.local_lines.clone();
        let (stores_bytes, loads_bytes) = (self.spill_stores_bytes, self.spill_loads_bytes);
        if stores_bytes > 0 || loads_bytes > 0 {
            faults.push(Fault::Spills { stores_bytes, loads_bytes, at: at() });
        } else if self.stack_bytes > 0 {
            faults.push(Fault::LocalMemory { bytes: self.stack_bytes, at: at() });
        }
        faults.extend(self.messages.iter().filter(|m| m.is_fault()).cloned().map(Fault::Remark));
        faults.extend(self.moved_waits.iter().cloned().map(Fault::MovedWait));
        faults.extend(self.late_publishes.iter().cloned().map(Fault::LatePublish));
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }
}

/// The number before a unit in the statistics. Messages are skipped, because they quote numbers of their own.
fn before(log: &str, unit: &str) -> Option<u32> {
    let statistics = log.lines().filter(|line| !line.contains(" : ("));
    statistics.into_iter().find_map(|line| {
        let (head, _) = line.split_once(&format!(" {unit}"))?;
        head.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    })
}

/// Prefix of the disassembler's source-line comments.
const SOURCE: &str = "//## File \"";

/// The Rust line in a source-line comment.
fn source_line(line: &str) -> Option<RustLine> {
    let (file, rest) = line.trim().strip_prefix(SOURCE)?.split_once('"')?;
    Some(RustLine { file: file.to_string(), line: line_number(rest)? })
}

/// Rust lines whose instructions load or store local memory.
pub(super) fn local_lines(sass: &str) -> Vec<RustLine> {
    let mut found = BTreeSet::new();
    let mut now: Option<RustLine> = None;
    for line in sass.lines() {
        if let Some(source) = source_line(line) {
            now = Some(source);
        } else if line.split_whitespace().any(|word| ["STL", "LDL"].iter().any(|op| word.split('.').next() == Some(op)))
        {
            found.extend(now.clone());
        }
    }
    found.into_iter().collect()
}

/// The disassembly with source lines as `file:line`, which editors and terminals turn into links.
pub(super) fn with_rust_lines(sass: &str) -> String {
    let mut out = String::with_capacity(sass.len());
    for line in sass.lines() {
        match source_line(line) {
            Some(source) => out.push_str(&format!("// {source}")),
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Target;

    const TEXT: &str = "\
.version 8.0
.file 1 \"kernels/a.rs\"
.file 2 \"ptx/b.rs\"
.visible .entry k()
{
  .loc 1 10 5
  first;
  .loc 2 20 1
  second;
  third;
}
";

    /// Output of ptxas 13.0.88 for a kernel with every fault.
    const LOG: &str = "\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : (C7519) warpgroup.arrive is injected in around line 7 by compiler to allow use of registers in GMMA in function 'k'
ptxas info    : (C7517) warpgroup.wait is injected in around line 10 by compiler to allow use of registers defined by GMMA in function 'k'
ptxas warning : Unresolved extern variable 'x' in whole program compilation, ignoring extern qualifier
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    256 bytes stack frame, 252 bytes spill stores, 248 bytes spill loads
ptxas info    : Used 64 registers, used 3 barriers, 256 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 79.838 ms
";

    fn kernel() -> Kernel {
        Kernel::build("k", Target::HOPPER, |k| k.threads(32, |_| {})).unwrap()
    }

    fn read(log: &str) -> Report {
        Report::read(&kernel(), log, &LineMap::of(TEXT), vec![1, 2]).unwrap()
    }

    #[test]
    fn numbers() {
        let report = read(LOG);
        let got = (report.registers, report.barriers, report.shared_bytes, report.stack_bytes);
        assert_eq!(got, (64, 3, 1024, 256));
        assert_eq!((report.spill_stores_bytes, report.spill_loads_bytes), (252, 248));
        assert_eq!(report.time, Duration::from_micros(79838));
    }

    #[test]
    fn remarks_lead_to_rust() {
        let shown: Vec<String> = read(LOG).messages.iter().map(ToString::to_string).collect();
        let want = [
            "C7508 Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.",
            "kernels/a.rs:10: C7519 warpgroup.arrive is injected in around line 7 by compiler to allow use of registers in GMMA in function 'k'",
            "ptx/b.rs:20: C7517 warpgroup.wait is injected in around line 10 by compiler to allow use of registers defined by GMMA in function 'k'",
            "warning Unresolved extern variable 'x' in whole program compilation, ignoring extern qualifier",
        ];
        assert_eq!(shown, want);
    }

    #[test]
    fn errors_lead_to_rust() {
        let log = "\
ptxas /tmp/x; line 3/kernel.ptx, line 9; error   : Arguments mismatch for instruction 'add'
ptxas fatal   : Ptx assembly aborted due to errors
";
        let shown: Vec<String> = Message::all(log, &LineMap::of(TEXT)).iter().map(ToString::to_string).collect();
        let want =
            ["ptx/b.rs:20: error Arguments mismatch for instruction 'add'", "error Ptx assembly aborted due to errors"];
        assert_eq!(shown, want);
    }

    #[test]
    fn verdicts() {
        let faults = read(LOG).verdict().unwrap_err();
        assert!(matches!(faults[0], Fault::Spills { stores_bytes: 252, loads_bytes: 248, .. }), "{faults:?}");
        // The warning is not a fault: it does not concern the generated code.
        assert_eq!(faults.len(), 4, "{faults:?}");

        let clean = LOG.lines().skip(4).map(|line| format!("{line}\n")).collect::<String>();
        let clean = clean.replace("256 bytes stack", "0 bytes stack").replace("252 bytes", "0 bytes");
        let clean = clean.replace("248 bytes", "0 bytes");
        assert_eq!(read(&clean).verdict(), Ok(()));
        let stack = read(&clean.replace("0 bytes stack", "16 bytes stack")).verdict().unwrap_err();
        assert_eq!(stack, [Fault::LocalMemory { bytes: 16, at: Vec::new() }]);
        let reads = read(&clean.replace("0 bytes spill loads", "4 bytes spill loads")).verdict().unwrap_err();
        assert_eq!(reads, [Fault::Spills { stores_bytes: 0, loads_bytes: 4, at: Vec::new() }]);
    }

    #[test]
    fn a_silent_assembler_is_an_error() {
        let refused = Report::read(&kernel(), "ptxas info    : done\n", &LineMap::default(), Vec::new());
        assert_eq!(
            refused.unwrap_err().to_string(),
            "ptxas on kernel `k`: no registers in what it said: `ptxas info    : done`"
        );
    }

    #[test]
    fn spills_are_found_in_machine_code() {
        let sass = "\
\t//## File \"kernels/a.rs\", line 10
        /*03e0*/                   LDG.E R34, desc[UR4][R30.64] ;
        /*03f0*/                   STL [R1+0x7c], R36                  (*\"SpillRefill\"*);
\t//## File \"ptx/b.rs\", line 20
        /*0440*/                   LDG.E R0, desc[UR4][R30.64+0xf4] ;
\t//## File \"ptx/b.rs\", line 21 inlined
        /*0450*/                   LDL.64 R0, [R1+0x80] ;
";
        let lines: Vec<String> = local_lines(sass).iter().map(ToString::to_string).collect();
        assert_eq!(lines, ["kernels/a.rs:10", "ptx/b.rs:21"]);
        assert!(with_rust_lines(sass).starts_with("// kernels/a.rs:10\n        /*03e0*/"));
    }
}
