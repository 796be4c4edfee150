//! Integers that grow evenly along the keys, as the index of a key and its distance from a query do.
//!
//! Sums and products of such indices are known for all keys of a tile at once. What depends on their sign or size is
//! decided block by block.

use super::{Cells, Evaluator, Form};
use crate::tiles::MAX_LANES;
use fulgurite_core::expr::{Binary, Step, Type, Unary, Var};

/// f32 holds every integer up to this.
const EXACT: i32 = 1 << 24;

/// Values of a ramp at the first and the last key of a block, per lane, and the smallest and largest of all.
struct Ends {
    first: [i32; MAX_LANES],
    last: [i32; MAX_LANES],
    low: i32,
    high: i32,
}

impl Evaluator<'_> {
    /// Base and slope of a step in each lane, if it is an integer that grows evenly along all keys.
    fn even(&self, step: usize) -> Option<([u32; MAX_LANES], [u32; MAX_LANES])> {
        match self.forms[step] {
            _ if !self.plan.axes[step].keys => Some((self.rows[step].value, [0; MAX_LANES])),
            Form::Ramp { rows, .. } if self.fixed[step] => Some((self.rows[rows].value, self.rows[rows].slope)),
            _ => None,
        }
    }

    /// Finds out whether a step is a ramp along all keys, for the lanes of another tile.
    pub(super) fn fix(&mut self, i: usize) {
        self.fixed[i] = false;
        if self.plan.program.types()[i] != Type::Int || self.plan.absorbed[i] {
            return;
        }
        let (mut value, mut slope) = ([0; MAX_LANES], [1; MAX_LANES]);
        match self.plan.program.steps()[i] {
            Step::Var(Var::Key) => {}
            Step::Unary(Unary::Neg, a) => {
                let Some((base, steep)) = self.even(a) else { return };
                (value, slope) = (base.map(u32::wrapping_neg), steep.map(u32::wrapping_neg));
            }
            Step::Binary(op, a, b) => {
                let flat = [a, b].map(|x| !self.plan.axes[x].keys);
                let (Some((p, s)), Some((q, t))) = (self.even(a), self.even(b)) else { return };
                for lane in 0..MAX_LANES {
                    let ((p, s), (q, t)) = ((p[lane], s[lane]), (q[lane], t[lane]));
                    (value[lane], slope[lane]) = match op {
                        Binary::Add => (p.wrapping_add(q), s.wrapping_add(t)),
                        Binary::Sub => (p.wrapping_sub(q), s.wrapping_sub(t)),
                        Binary::Mul if flat[0] => (p.wrapping_mul(q), p.wrapping_mul(t)),
                        Binary::Mul if flat[1] => (p.wrapping_mul(q), s.wrapping_mul(q)),
                        _ => return,
                    };
                }
            }
            _ => return,
        }
        (self.rows[i].value, self.rows[i].slope) = (value, slope);
        self.forms[i] = Form::Ramp { rows: i, factor: None, magnitude: false };
        self.fixed[i] = true;
    }

    /// What a step is at the ends of a block before its sign is dropped, if no integer wraps in between.
    #[inline(always)]
    fn ends(&self, step: usize, at: &Cells) -> Option<Ends> {
        let (rows, steep) = match self.forms[step] {
            Form::Lanes => (step, 0),
            Form::Ramp { rows, .. } => (rows, u32::MAX),
            _ => return None,
        };
        let rows = &self.rows[rows];
        let mut ends = Ends { first: [0; MAX_LANES], last: [0; MAX_LANES], low: i32::MAX, high: i32::MIN };
        let (first, distance) = (at.first as u32, at.n as i32 - 1);
        let (mut low, mut high, mut least, mut most) = (i32::MAX, i32::MIN, 0, 0);
        for lane in 0..self.lanes {
            let slope = (rows.slope[lane] & steep) as i32;
            let start = rows.value[lane].wrapping_add((slope as u32).wrapping_mul(first)) as i32;
            let last = start.wrapping_add(slope.wrapping_mul(distance));
            (ends.first[lane], ends.last[lane]) = (start, last);
            (low, high) = (low.min(start).min(last), high.max(start).max(last));
            (least, most) = (least.min(slope), most.max(slope));
        }
        (ends.low, ends.high) = (low, high);
        // Slopes so small that a block's share of them cannot wrap, and values so far from the ends.
        let near = |x: i32, bound: i32| -bound < x && x < bound;
        let whole = near(least, 1 << 16) && near(most, 1 << 16) && near(low, 1 << 30) && near(high, 1 << 30);
        whole.then_some(ends)
    }

    /// Computes a step of one operand as a ramp, if it is one in this block.
    #[inline(always)]
    pub(super) fn ramp_unary(&mut self, i: usize, op: Unary, a: usize, at: &Cells) -> bool {
        let Form::Ramp { rows, factor, magnitude } = self.forms[a] else { return false };
        match op {
            Unary::Neg if self.plan.float(a) => {
                let own = factor.map_or([1.0; MAX_LANES], |step| self.rows[step].value.map(f32::from_bits));
                self.rows[i].value = own.map(|x| (-x).to_bits());
                self.forms[i] = Form::Ramp { rows, factor: Some(i), magnitude };
            }
            Unary::Abs if !self.plan.float(a) && !magnitude => {
                let Some(ends) = self.ends(a, at) else { return false };
                if ends.low >= 0 {
                    self.forms[i] = self.forms[a];
                    return true;
                }
                let crosses = |lane: usize| (ends.first[lane] < 0) != (ends.last[lane] < 0);
                if ends.high > 0 && (0..self.lanes).any(crosses) {
                    self.forms[i] = Form::Ramp { rows, factor: None, magnitude: true };
                    return true;
                }
                let mut own = self.rows[rows].clone();
                for lane in 0..self.lanes {
                    let sign = if ends.first[lane].min(ends.last[lane]) < 0 { u32::MAX } else { 1 };
                    own.value[lane] = own.value[lane].wrapping_mul(sign);
                    own.slope[lane] = own.slope[lane].wrapping_mul(sign);
                }
                self.rows[i] = own;
                self.forms[i] = Form::Ramp { rows: i, factor: None, magnitude: false };
            }
            Unary::ToFloat => {
                let Some(ends) = self.ends(a, at) else { return false };
                if ends.low <= -EXACT || ends.high >= EXACT {
                    return false;
                }
                let slope = self.rows[rows].slope;
                let own = &mut self.rows[i];
                own.value = ends.first.map(|x| (x as f32).to_bits());
                own.slope = slope.map(|x| (x as i32 as f32).to_bits());
                self.forms[i] = Form::Ramp { rows: i, factor: None, magnitude };
            }
            _ => return false,
        }
        true
    }

    /// Computes a step of two operands as a ramp, if it is one in this block.
    #[inline(always)]
    pub(super) fn ramp_binary(&mut self, i: usize, op: Binary, [a, b]: [usize; 2], at: &Cells) -> bool {
        if self.plan.float(a) {
            // A ramp of floats times a value of each lane.
            let made = match (self.forms[a], self.forms[b]) {
                (Form::Ramp { rows, factor: None, magnitude }, Form::Lanes) => {
                    Form::Ramp { rows, factor: Some(b), magnitude }
                }
                (Form::Lanes, Form::Ramp { rows, factor: None, magnitude }) => {
                    Form::Ramp { rows, factor: Some(a), magnitude }
                }
                _ => return false,
            };
            if op == Binary::Mul {
                self.forms[i] = made;
            }
            return op == Binary::Mul;
        }
        let signed = |step: usize| !matches!(self.forms[step], Form::Ramp { magnitude: true, .. });
        if !matches!(op, Binary::Min | Binary::Max) || !signed(a) || !signed(b) {
            return false;
        }
        let (Some(x), Some(y)) = (self.ends(a, at), self.ends(b, at)) else { return false };
        // Two lines that keep their order at both ends keep it in between.
        let (mut least, mut most) = (i32::MAX, i32::MIN);
        for lane in 0..self.lanes {
            let [first, last] = [x.first[lane] - y.first[lane], x.last[lane] - y.last[lane]];
            (least, most) = (least.min(first).min(last), most.max(first).max(last));
        }
        let (first, second) = (most <= 0, least >= 0);
        let (low, high) = if op == Binary::Min { (first, second) } else { (second, first) };
        let chosen = if low { a } else { b };
        if !low && !high {
            return false;
        }
        self.forms[i] = match self.forms[chosen] {
            // A step of each lane, as a ramp without a slope.
            Form::Lanes => {
                self.rows[i].value = self.rows[chosen].value;
                self.rows[i].slope = [0; MAX_LANES];
                Form::Ramp { rows: i, factor: None, magnitude: false }
            }
            form => form,
        };
        true
    }
}
