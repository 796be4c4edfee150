//! A kernel ready to run: its statements as a flat list with jump targets.

use crate::well_formed;
use fulgurite_ptx::inst::{Class, Op, Reg};
use fulgurite_ptx::kernel::{Kernel, Stmt};
use std::panic::Location;
use std::sync::Arc;

/// One step of a program. `skip` is where a warp without active lanes continues: the end of the innermost statement.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    /// Executes an instruction.
    Op(u32),
    /// Lanes where `cond` holds continue here, the others wait for [`Step::Else`].
    If { cond: usize, otherwise: u32 },
    /// The other lanes continue here.
    Else { end: u32 },
    /// All lanes continue together.
    EndIf { skip: u32 },
    /// Enters a loop.
    Loop,
    /// Goes back to `start`, or out if every lane has left.
    EndLoop { start: u32, skip: u32 },
    /// Lanes where `cond` is `when` leave the innermost loop.
    Break { cond: usize, when: bool, skip: u32 },
    /// The end of the kernel.
    Exit,
}

/// A kernel as a list of steps.
pub(crate) struct Program {
    pub kernel: Arc<Kernel>,
    pub steps: Vec<Step>,
    pub ops: Vec<Op>,
    /// The Rust line of each step.
    pub lines: Vec<&'static Location<'static>>,
    /// Index of the first register of each class in a warp's register file.
    pub first: [usize; Class::ALL.len()],
    /// Total number of registers.
    pub registers: usize,
}

impl Program {
    /// Flattens a kernel after checking that every instruction is well formed.
    pub fn new(kernel: Arc<Kernel>) -> Result<Program, String> {
        well_formed::check(&kernel)?;
        let mut first = [0; Class::ALL.len()];
        let mut registers = 0;
        for class in Class::ALL {
            first[class as usize] = registers;
            registers += kernel.registers[class as usize] as usize;
        }
        let (steps, ops, lines) = (Vec::new(), Vec::new(), Vec::new());
        let mut program = Program { kernel: kernel.clone(), steps, ops, lines, first, registers };
        program.block(&kernel.body);
        program.push(Step::Exit, Location::caller());
        Ok(program)
    }

    /// Index of a register in a warp's register file.
    pub fn slot(&self, reg: Reg) -> usize {
        self.first[reg.class as usize] + reg.index as usize
    }

    fn push(&mut self, step: Step, at: &'static Location<'static>) -> usize {
        self.steps.push(step);
        self.lines.push(at);
        self.steps.len() - 1
    }

    /// Appends a block of statements. Returns the steps that need the end of the enclosing statement.
    fn block(&mut self, block: &[Stmt]) -> Vec<usize> {
        let mut open = Vec::new();
        for stmt in block {
            match stmt {
                Stmt::Op(op) => {
                    self.ops.push(op.clone());
                    self.push(Step::Op(self.ops.len() as u32 - 1), op.at);
                }
                Stmt::If { cond, then, otherwise, at, .. } => {
                    let start = self.push(Step::If { cond: self.slot(*cond), otherwise: 0 }, at);
                    let inside = self.block(then);
                    let middle = self.push(Step::Else { end: 0 }, at);
                    self.close(inside, middle);
                    let inside = self.block(otherwise);
                    let end = self.push(Step::EndIf { skip: 0 }, at);
                    self.close(inside, end);
                    self.steps[start] = Step::If { cond: self.slot(*cond), otherwise: middle as u32 };
                    self.steps[middle] = Step::Else { end: end as u32 };
                    open.push(end);
                }
                Stmt::Loop { body, at } => {
                    let start = self.push(Step::Loop, at);
                    let inside = self.block(body);
                    let end = self.push(Step::EndLoop { start: start as u32 + 1, skip: 0 }, at);
                    self.close(inside, end);
                    open.push(end);
                }
                Stmt::Break { cond, when, at } => {
                    let step = Step::Break { cond: self.slot(*cond), when: *when, skip: 0 };
                    open.push(self.push(step, at));
                }
            }
        }
        open
    }

    fn close(&mut self, open: Vec<usize>, end: usize) {
        for i in open {
            match &mut self.steps[i] {
                Step::Break { skip, .. } | Step::EndIf { skip } | Step::EndLoop { skip, .. } => *skip = end as u32,
                _ => {}
            }
        }
    }
}
