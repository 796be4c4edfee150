//! Roles: which warps of a CTA do which job, and how many registers each warpgroup has.

use super::scope::{Cta, Group, Scope, WarpRole, WholeWarps};
use super::{Builder, WARPGROUP};
use crate::inst::Arg;
use crate::kernel::{RoleUse, Stmt};
use crate::table::sync;
use std::panic::Location;

/// Warps of a warpgroup.
const FOUR: u32 = WARPGROUP / 32;

/// Size of a role in warps.
pub trait RoleSize {
    /// The scope in which the role is built.
    type Who: WholeWarps;
    /// Number of warps.
    fn warps(&self) -> u32;
    /// Registers per thread, if the role requests a number.
    fn registers(&self) -> Option<u32>;
    /// Whether the role must start at a warpgroup boundary.
    const ALIGNED: bool;
}

/// A role of whole warpgroups.
#[derive(Debug, Clone, Copy)]
pub struct Warpgroups {
    count: u32,
    registers: Option<u32>,
}

/// A role of `count` warpgroups.
#[allow(non_snake_case)] // reads as what it is: `Warpgroups(2).registers(240)`
pub fn Warpgroups(count: u32) -> Warpgroups {
    Warpgroups { count, registers: None }
}

impl Warpgroups {
    /// Sets the registers per thread. At its start the role takes them from the pool, or returns the excess to it.
    pub fn registers(self, count: u32) -> Self {
        Warpgroups { registers: Some(count), ..self }
    }
}

impl RoleSize for Warpgroups {
    type Who = Group;
    const ALIGNED: bool = true;
    fn warps(&self) -> u32 {
        FOUR * self.count
    }
    fn registers(&self) -> Option<u32> {
        self.registers
    }
}

/// A role of any number of warps.
#[derive(Debug, Clone, Copy)]
pub struct Warps {
    count: u32,
    registers: Option<u32>,
}

/// A role of `count` warps.
#[allow(non_snake_case)] // reads as what it is: `Warps(1).registers(40)`
pub fn Warps(count: u32) -> Warps {
    Warps { count, registers: None }
}

impl Warps {
    /// Sets the registers per thread. `setmaxnreg` changes whole warpgroups, so roles that share a warpgroup must
    /// request the same number; a role that requests none gets the number of the others.
    pub fn registers(self, count: u32) -> Self {
        Warps { registers: Some(count), ..self }
    }
}

impl RoleSize for Warps {
    type Who = WarpRole;
    const ALIGNED: bool = false;
    fn warps(&self) -> u32 {
        self.count
    }
    fn registers(&self) -> Option<u32> {
        self.registers
    }
}

/// A role and its statements.
type Role = (RoleUse, Vec<Stmt>);

/// The number of leading roles that share warpgroups with each other and with no later role.
fn sharing(roles: &[Role]) -> usize {
    let whole = |(role, _): &Role| (role.first_warp + role.warps).is_multiple_of(FOUR);
    roles.iter().position(whole).map_or(roles.len(), |last| last + 1)
}

impl Builder {
    /// Declares a role: some warps that do one job. Roles take the CTA's warps in the order of declaration.
    #[track_caller]
    pub fn role<'k, S: RoleSize>(&'k self, name: &str, size: S, f: impl FnOnce(&Scope<'k, S::Who>)) {
        let (number, first_warp) = {
            let mut state = self.state.borrow_mut();
            let first_warp: u32 = state.roles.iter().map(|(role, _)| role.warps).sum();
            let role = RoleUse { name: name.into(), first_warp, warps: size.warps(), registers: size.registers() };
            state.roles.push((role, Vec::new()));
            state.role_places.push(Location::caller());
            let depth = state.blocks.len();
            state.role = Some((state.roles.len() - 1, depth));
            (state.roles.len() - 1, first_warp)
        };
        if size.warps() == 0 {
            self.refuse(format!("role `{name}` has no warps, allowed: 1 or more"));
        }
        if S::ALIGNED && !first_warp.is_multiple_of(FOUR) {
            self.refuse(format!(
                "role `{name}` of whole warpgroups begins at warp {first_warp}, allowed: multiples of 4; declare it before roles of fewer warps"
            ));
        }
        let body = self.block(|| {
            let inner = self.block(|| f(&Scope::new(self)));
            self.state.borrow_mut().blocks.last_mut().expect("bug in fulgurite: no open block").extend(inner);
        });
        let mut state = self.state.borrow_mut();
        state.role = None;
        state.roles[number].1 = body;
    }

    /// First warp and number of warps of the current role.
    pub(crate) fn role_warps(&self) -> (u32, u32) {
        let state = self.state.borrow();
        match state.role {
            Some((role, _)) => (state.roles[role].0.first_warp, state.roles[role].0.warps),
            None => (0, state.threads / 32),
        }
    }

    /// Gives roles that share a warpgroup the register count that one of them requests. Rejects different counts:
    /// `setmaxnreg` is one instruction of a whole warpgroup.
    pub(super) fn share_registers(&self, mut roles: Vec<Role>) -> Vec<Role> {
        let places = self.state.borrow().role_places.clone();
        let mut start = 0;
        while start < roles.len() {
            let end = start + sharing(&roles[start..]);
            let asks = (start..end).find(|&i| roles[i].0.registers.is_some());
            if let Some(asks) = asks {
                let (name, wanted) = (roles[asks].0.name.clone(), roles[asks].0.registers);
                let last = &roles[end - 1].0;
                if !(last.first_warp + last.warps).is_multiple_of(FOUR) {
                    let what = format!(
                        "role `{name}` asks for registers in a warpgroup of fewer than four warps, allowed: whole warpgroups; add warps to `{}`",
                        last.name
                    );
                    self.placed(places[asks], || self.refuse(what));
                }
                for (i, (role, _)) in (start..).zip(&mut roles[start..end]) {
                    if role.registers.is_some_and(|own| Some(own) != wanted) {
                        let what = format!(
                            "role `{}` asks for {} registers and shares a warpgroup with role `{name}`, which asks for {}; allowed: equal numbers, or roles of whole warpgroups",
                            role.name,
                            role.registers.unwrap_or_default(),
                            wanted.unwrap_or_default()
                        );
                        self.placed(places[i], || self.refuse(what));
                    }
                    role.registers = wanted;
                }
            }
            start = end;
        }
        roles
    }

    /// Branches each warp to its role. Roles that share a warpgroup change their registers together, before they
    /// branch.
    pub(super) fn dispatch(&self, roles: Vec<Role>, entry: u32) {
        let places = std::mem::take(&mut self.state.borrow_mut().role_places);
        let last = roles.len() - 1;
        let unit = match roles.iter().all(|(role, _)| role.warps.is_multiple_of(FOUR)) {
            true => FOUR,
            false => 1,
        };
        let mut conditions = Vec::new();
        self.placed(places[0], || {
            // The value is equal in all lanes of a warp, but the assembler knows that only after the shuffle.
            let own = (Scope::<Cta>::new(self).thread() / (32 * unit)).of_first_lane();
            for (role, _) in &roles[..last] {
                conditions.push(own.lt((role.first_warp + role.warps) / unit).in_register());
            }
        });
        // Ranges of roles that share warpgroups.
        let mut ranges = Vec::new();
        while let Some(start) = ranges.last().map_or(Some(0), |r: &std::ops::Range<usize>| Some(r.end))
            && start < roles.len()
        {
            ranges.push(start..start + sharing(&roles[start..]));
        }
        let mut roles: Vec<Option<Role>> = roles.into_iter().map(Some).collect();
        let mut rest: Vec<Stmt> = Vec::new();
        for range in ranges.into_iter().rev() {
            let (first, end) = (range.start, range.end);
            let registers = roles[first].as_ref().and_then(|(role, _)| role.registers);
            let mut own = self.block(|| {
                if let Some(registers) = registers {
                    let way = if registers > entry { "inc" } else { "dec" };
                    let args = [Arg::Word(way), Arg::Imm(registers.into())];
                    self.placed(places[first], || self.emit(&sync::SETMAXNREG, args));
                }
            });
            let mut inner: Vec<Stmt> = Vec::new();
            for i in range.rev() {
                let body = roles[i].take().map(|(_, body)| body).unwrap_or_default();
                inner = match i + 1 == end {
                    true => body,
                    false => vec![branch(conditions[i], body, inner, places[i])],
                };
            }
            own.extend(inner);
            rest = match end - 1 == last {
                true => own,
                false => vec![branch(conditions[end - 1], own, rest, places[first])],
            };
        }
        self.state.borrow_mut().blocks[0].extend(rest);
    }
}

fn branch(cond: crate::inst::Reg, then: Vec<Stmt>, otherwise: Vec<Stmt>, at: &'static Location<'static>) -> Stmt {
    Stmt::If { cond, then, otherwise, cold: false, at }
}
