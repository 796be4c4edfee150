//! Prints a kernel as PTX text.

use crate::inst::{Arg, Base, Class, Kind, Op, Reg};
use crate::kernel::{Kernel, ParamKind, Stmt};
use crate::verify::varying;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

impl Kernel {
    /// The text that the driver compiles. Equal kernels give equal text.
    pub fn ptx(&self) -> String {
        let mut p = Printer {
            kernel: self,
            out: String::new(),
            files: Vec::new(),
            numbers: HashMap::new(),
            labels: 0,
            line: (0, 0),
            cold: Vec::new(),
            varying: varying(self),
        };
        p.block(&self.body, None);
        p.out.push_str("  ret;\n");
        while let Some(Cold { label, back, exit, body }) = p.cold.pop() {
            let _ = writeln!(p.out, "{label}:");
            p.block(&body, exit.as_deref());
            let _ = writeln!(p.out, "  bra.uni {back};");
        }
        let body = std::mem::take(&mut p.out);
        let mut text = String::with_capacity(body.len() + 1024);
        let (major, minor) = self.ptx_version();
        let _ = writeln!(text, ".version {major}.{minor}\n.target {}\n.address_size 64", self.target.name());
        for (i, file) in p.files.iter().enumerate() {
            let _ = writeln!(text, ".file {} \"{file}\"", i + 1);
        }
        if self.shared_bytes > 0 {
            text.push_str(".extern .shared .align 1024 .b8 smem[];\n");
        }
        let _ = write!(text, ".visible .entry {}(", self.name);
        for (i, param) in self.params.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let _ = match &param.kind {
                ParamKind::U32 => write!(text, "{comma}\n  .param .u32 {}", param.name),
                ParamKind::F32 => write!(text, "{comma}\n  .param .f32 {}", param.name),
                ParamKind::U64 => write!(text, "{comma}\n  .param .u64 {}", param.name),
                ParamKind::Pointer(align) => {
                    write!(text, "{comma}\n  .param .u64 .ptr .global .align {align} {}", param.name)
                }
                ParamKind::Tensor(_) => write!(text, "{comma}\n  .param .align 128 .b8 {}[128]", param.name),
            };
        }
        let _ = writeln!(text, ")\n.reqntid {}, 1, 1", self.threads);
        if self.roles.iter().any(|role| role.registers.is_some()) {
            // Without this directive the assembler does not know the register count at entry and drops setmaxnreg.
            text.push_str(".minnctapersm 1\n");
        } else if let Some(most) = self.most_registers {
            let _ = writeln!(text, ".maxnreg {most}");
        }
        if self.cluster > 1 {
            let _ = writeln!(text, ".reqnctapercluster {}, 1, 1", self.cluster);
        }
        text.push_str("{\n");
        for class in Class::ALL {
            let (kind, prefix) = class.spelling();
            let count = self.registers[class as usize];
            if count > 0 {
                let _ = writeln!(text, "  .reg .{kind} {prefix}<{count}>;");
            }
        }
        text.push_str(&body);
        text.push_str("}\n");
        text
    }

    /// Number of warpgroups of a CTA.
    pub fn warpgroups(&self) -> u32 {
        self.threads.div_ceil(WARPGROUP)
    }
}

struct Printer<'a> {
    kernel: &'a Kernel,
    out: String,
    files: Vec<&'static str>,
    numbers: HashMap<&'static str, usize>,
    labels: u32,
    /// File and line of the last `.loc`.
    line: (usize, u32),
    /// Cold code to print after the main body.
    cold: Vec<Cold>,
    /// Registers that may differ between the lanes of a warp.
    varying: HashSet<Reg>,
}

/// Code of a rarely taken branch, printed after the main body.
struct Cold {
    label: String,
    /// Label at which the main body continues.
    back: String,
    /// Label at the end of the enclosing loop.
    exit: Option<String>,
    body: Vec<Stmt>,
}

fn register(reg: Reg) -> String {
    format!("{}{}", reg.class.spelling().1, reg.index)
}

impl Printer<'_> {
    fn label(&mut self, hint: &str) -> String {
        self.labels += 1;
        format!("${hint}_{}", self.labels)
    }

    fn block(&mut self, block: &[Stmt], exit: Option<&str>) {
        for stmt in block {
            match stmt {
                Stmt::Op(op) => self.op(op, None),
                Stmt::If { cond, then, otherwise, cold, .. } => self.branch(*cond, then, otherwise, *cold, exit),
                Stmt::Loop { body, .. } => {
                    let (again, done) = (self.label("LOOP"), self.label("DONE"));
                    let _ = writeln!(self.out, "{again}:");
                    self.block(body, Some(&done));
                    let _ = writeln!(self.out, "  bra.uni {again};\n{done}:");
                }
                Stmt::Break { cond, when, .. } => {
                    let not = if *when { "" } else { "!" };
                    let exit = exit.expect("bug in fulgurite: a break outside a loop");
                    let _ = writeln!(self.out, "  @{not}{} bra{} {exit};", register(*cond), self.uniform(*cond));
                }
            }
        }
    }

    /// Marks a branch as uniform if the whole warp takes it together. The assembler serialises products under other
    /// branches.
    fn uniform(&self, cond: Reg) -> &'static str {
        if self.varying.contains(&cond) { "" } else { ".uni" }
    }

    fn branch(&mut self, cond: Reg, then: &[Stmt], otherwise: &[Stmt], cold: bool, exit: Option<&str>) {
        let (uni, cond) = (self.uniform(cond), register(cond));
        match (then, otherwise) {
            ([], []) => {}
            ([Stmt::Op(op)], []) => self.op(op, Some(&format!("@{cond} "))),
            ([], [Stmt::Op(op)]) => self.op(op, Some(&format!("@!{cond} "))),
            (_, []) if cold => {
                let (there, back) = (self.label("COLD"), self.label("BACK"));
                let _ = writeln!(self.out, "  @{cond} bra{uni} {there};\n{back}:");
                self.cold.push(Cold { label: there, back, exit: exit.map(str::to_owned), body: then.to_vec() });
            }
            (_, []) => {
                let end = self.label("END");
                let _ = writeln!(self.out, "  @!{cond} bra{uni} {end};");
                self.block(then, exit);
                let _ = writeln!(self.out, "{end}:");
            }
            _ => {
                let (other, end) = (self.label("ELSE"), self.label("END"));
                let _ = writeln!(self.out, "  @!{cond} bra{uni} {other};");
                self.block(then, exit);
                let _ = writeln!(self.out, "  bra{uni} {end};\n{other}:");
                self.block(otherwise, exit);
                let _ = writeln!(self.out, "{end}:");
            }
        }
    }

    fn op(&mut self, op: &Op, guard: Option<&str>) {
        self.location(op);
        self.out.push_str("  ");
        self.out.push_str(guard.unwrap_or(""));
        // Braces around an operand's name are replaced; all other braces belong to the assembler's syntax.
        let mut rest = op.inst.text;
        while let Some(open) = rest.find('{') {
            let (before, after) = rest.split_at(open);
            self.out.push_str(before);
            let close = after.find('}').unwrap_or(after.len() - 1);
            let name = &after[1..close];
            match op.inst.operands.iter().position(|o| o.name == name) {
                Some(i) => {
                    self.operand(op, i);
                    rest = &after[close + 1..];
                }
                None => {
                    self.out.push('{');
                    rest = &after[1..];
                }
            }
        }
        self.out.push_str(rest);
        self.out.push('\n');
    }

    fn operand(&mut self, op: &Op, i: usize) {
        let kind = op.inst.operands[i].kind;
        let _ = match &op.args[i] {
            Arg::Reg(reg) => write!(self.out, "{}", register(*reg)),
            Arg::Imm(bits) => match kind {
                Kind::Value(Class::F32) => write!(self.out, "0f{:08X}", *bits as u32),
                Kind::Value(Class::B32) if *bits > 0xffff => write!(self.out, "{:#x}", *bits as u32),
                Kind::Value(Class::B64) if *bits > 0xffff => write!(self.out, "{bits:#x}"),
                _ => write!(self.out, "{bits}"),
            },
            Arg::List(regs) => {
                let bare = regs.len() == 1 && matches!(kind, Kind::Vector(_));
                let names: Vec<String> = regs.iter().map(|&r| register(r)).collect();
                if bare { write!(self.out, "{}", names[0]) } else { write!(self.out, "{{{}}}", names.join(", ")) }
            }
            Arg::Address(base, offset) => {
                let start = match base {
                    Base::Reg(reg) => register(*reg),
                    Base::Param(n) => self.kernel.params[*n as usize].name.clone(),
                };
                match offset {
                    0 => write!(self.out, "[{start}]"),
                    _ => write!(self.out, "[{start}{offset:+}]"),
                }
            }
            Arg::Word(word) => write!(self.out, "{word}"),
            Arg::Param(n) => write!(self.out, "{}", self.kernel.params[*n as usize].name),
        };
    }

    /// Prints `.loc` when the Rust line changes, so that profilers and assembler messages point to Rust source.
    fn location(&mut self, op: &Op) {
        let file = op.at.file();
        let number = match self.numbers.get(file) {
            Some(&n) => n,
            None => {
                self.files.push(file);
                self.numbers.insert(file, self.files.len());
                self.files.len()
            }
        };
        if self.line != (number, op.at.line()) {
            self.line = (number, op.at.line());
            let _ = writeln!(self.out, "  .loc {number} {} {}", op.at.line(), op.at.column());
        }
    }
}
