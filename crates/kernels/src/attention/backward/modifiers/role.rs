//! Modifiers in the main kernel: parameters, and their code in a compute role.

use crate::attention::backward::d_q::exact::ExactSums;
use crate::attention::backward::d_q::service::Log;
use crate::attention::backward::modifiers::{ModifierGradients, is_one};
use crate::attention::backward::tiles::{Sequence, TileMap, Work};
use crate::params::{Lens, Params};
use crate::parts::modifier::{AuxArgs, BlockKind, Function, Modify, Parameters, Tanh, TilePosition};
use fulgurite_core::expr::Program;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Acc, Group, Pointer, RowView, Scope, Val};
use std::rc::Rc;

/// For each axis of a tensor: the last index and the stride, in elements.
type Axes<'k> = Vec<[Val<'k, u32>; 2]>;

/// A gradient of an auxiliary tensor, and its words if it is summed exactly.
struct Sums<'k> {
    to: Pointer<'k, f32>,
    exact: Option<ExactSums<'k>>,
}

impl<'k> Sums<'k> {
    fn add(&self, w: &Scope<'k, Group>, at: Val<'k, u64>, x: Val<'k, f32>) {
        match &self.exact {
            Some(exact) => exact.add(w, self.to, at, x),
            None => self.to.at_wide(at).add(w, 0, x),
        }
    }
}

/// Arguments of a gradient of an auxiliary tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AuxGradientArgs {
    pub to: Span,
    /// Words of exact sums, if it is summed exactly.
    pub words: Option<Span>,
    /// For each axis the last index and the stride, in elements.
    pub axes: Vec<[u32; 2]>,
}

/// Arguments of [`ModifierParams`].
#[derive(Debug, Clone, Default)]
pub(crate) struct ModifierArgs {
    /// Auxiliary tensors, and the gradients of those that want one.
    pub aux: Vec<AuxArgs>,
    pub d_aux: Vec<AuxGradientArgs>,
    /// Queries of a sequence, if all have the same.
    pub q_len: u32,
}

/// Parameters of modifiers and of the gradients that they add to.
pub(crate) struct ModifierParams<'k> {
    modifiers: ModifierGradients,
    parameters: Parameters<'k>,
    /// For each gradient its sums and axes.
    sums: Vec<(Sums<'k>, Axes<'k>)>,
    /// Queries of a sequence, if all have the same.
    q_len: Option<Val<'k, u32>>,
}

impl<'k> ModifierParams<'k> {
    /// Declares the parameters; `None` for a problem without modifiers. `ragged`: sequences differ in length.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        args: impl Lens<C, ModifierArgs>,
        (modifiers, ragged): (&ModifierGradients, bool),
        log: &Rc<Log>,
    ) -> Option<Self> {
        if modifiers.is_empty() {
            return None;
        }
        let parameters = Parameters::declare(p, &modifiers.modifiers, move |call| &args(call).aux);
        let sums = modifiers.aux.iter().enumerate().map(|(i, gradient)| {
            let to = p.array(&format!("d_aux{i}"), move |call| args(call).d_aux[i].to);
            let exact = modifiers.exact[i]
                .then(|| ExactSums::declare(p, &format!("d_aux{i}_words"), move |call| args(call).d_aux[i].words, log));
            let axis = |axis: usize| {
                [("last", 0), ("stride", 1)].map(|(what, side)| {
                    p.u32(&format!("d_aux{i}_{what}{axis}"), move |call| args(call).d_aux[i].axes[axis][side])
                })
            };
            (Sums { to, exact }, (0..gradient.at.len()).map(axis).collect())
        });
        let sums = sums.collect();
        let q_len = (!ragged).then(|| p.u32("q_len", move |call| args(call).q_len));
        Some(ModifierParams { modifiers: modifiers.clone(), parameters, sums, q_len })
    }

    /// Whether there are gradients of auxiliary tensors.
    pub fn has_gradients(&self) -> bool {
        !self.sums.is_empty()
    }

    /// The modifiers in a compute role, on the accumulators of any tensor unit.
    pub fn in_role<A: RowView<'k>>(&self, w: &Scope<'k, Group>, scale: Val<'k, f32>) -> ModifierRole<'_, 'k, A> {
        let ModifierGradients { modifiers, derivative, aux, .. } = &self.modifiers;
        let function = |program: &Program| Function::of_view::<A>(w, program, modifiers, &self.parameters, scale);
        ModifierRole {
            of: self,
            modify: Modify::of_view(w, modifiers, &self.parameters, scale, Tanh::Polynomial),
            derivative: derivative.as_ref().map(function),
            aux: aux
                .iter()
                .map(|gradient| {
                    let derivative = (!is_one(&gradient.derivative)).then(|| function(&gradient.derivative));
                    (gradient.at.iter().map(function).collect(), derivative)
                })
                .collect(),
        }
    }
}

/// The indices of an element of an auxiliary tensor, and dm/da where it is not 1.
type AuxFunctions<'a, 'k> = (Vec<Function<'a, 'k>>, Option<Function<'a, 'k>>);

/// Modifiers in a compute role.
pub(crate) struct ModifierRole<'a, 'k, A = Acc<'k>> {
    of: &'a ModifierParams<'k>,
    modify: Modify<'a, 'k, A>,
    derivative: Option<Function<'a, 'k>>,
    aux: Vec<AuxFunctions<'a, 'k>>,
}

/// The derivatives of a block's modified scores; `None` if they are 1.
pub(crate) struct Slopes<'k> {
    score: Option<Vec<Val<'k, f32>>>,
    aux: Vec<Option<Vec<Val<'k, f32>>>>,
    /// The query that the block begins at.
    first: Val<'k, i32>,
}

impl<'k, A: RowView<'k>> ModifierRole<'_, 'k, A> {
    /// Evaluates what stays the same for a query head and the warpgroup's keys, which begin at `key`.
    pub fn set(&self, w: &Scope<'k, Group>, map: &TileMap<'k>, work: &Work<'k>, head: Val<'k, u32>, key: Val<'k, u32>) {
        let first = (key + A::first_row(w)).to_i32();
        let q_len = match work.sequence {
            Sequence::Dense(_) => self.of.q_len.expect("bug in fulgurite: a parameter of equal sequences"),
            Sequence::Ragged(sequence) => sequence.q_len,
        };
        let (q_len, k_len) = (q_len.to_i32(), map.k_len(work.sequence).to_i32());
        let row = |i: usize| if i == 0 { first } else { first + A::row_offset(i) as i32 };
        let (heads, rows) = (vec![head; A::ROWS], (0..A::ROWS).map(row).collect());
        let place = &TilePosition { batch: work.batch, heads, rows, q_len, k_len };
        self.modify.set(w, place);
        let aux = self.aux.iter().flat_map(|(at, derivative)| at.iter().chain(derivative));
        self.derivative.iter().chain(aux).for_each(|function| function.set(w, place));
    }

    /// The kind of the block that holds the step from query `first` on, if blocks are whole steps.
    pub fn block_kind(&self, w: &Scope<'k, Group>, first: Val<'k, i32>) -> Option<BlockKind<'k>> {
        self.modify.block_kind(w, first)
    }

    /// Whether the modifiers hide elements and change no score.
    pub fn only_masks(&self) -> bool {
        self.of.modifiers.modifiers.score.is_none()
    }

    /// Hides elements of a step that begins at query `first` and lies in a block of this kind.
    pub fn mask(&self, w: &Scope<'k, Group>, s: &A, first: Val<'k, i32>, kind: BlockKind<'k>) {
        self.modify.apply_in_block(w, s, first, kind);
    }

    /// Modifies the scores of a part of a step that begins at query `first`. Returns the derivatives.
    pub fn apply(&self, w: &Scope<'k, Group>, s: &A, first: Val<'k, i32>, kind: Option<BlockKind<'k>>) -> Slopes<'k> {
        let floats = |function: &Function<'_, 'k>| function.floats(w, s, first);
        let score = self.derivative.as_ref().map(floats);
        let aux = self.aux.iter().map(|(_, derivative)| derivative.as_ref().map(floats)).collect();
        match kind {
            Some(kind) => self.modify.apply_in_block(w, s, first, kind),
            None => self.modify.apply(w, s, first, None),
        }
        Slopes { score, aux, first }
    }

    /// Offsets of the elements of gradient `g` that the scores of a block read. No index depends on a score.
    fn places(&self, w: &Scope<'k, Group>, g: usize, any: &A, first: Val<'k, i32>) -> Vec<Val<'k, u64>> {
        let axes = self.aux[g].0.iter().map(|function| function.ints(w, any, first)).zip(&self.of.sums[g].1);
        let axes: Vec<(Vec<_>, &[Val<'k, u32>; 2])> = axes.collect();
        let place = |i: usize| {
            let parts = axes.iter().map(|(index, [last, stride])| {
                // Past the last query or key the term is 0: clamp the index to any valid one.
                index[i].max(0).to_u32().min(*last).mul_wide(*stride)
            });
            parts.reduce(|a, b| a + b).unwrap_or(w.constant(0u64))
        };
        (0..any.elements().count()).map(place).collect()
    }

    /// Replaces d_p by d_z and adds to the gradients of auxiliary tensors. `after` is called after each eight columns. Where p
    /// is 0, all terms are 0, whatever the other factors are.
    pub fn gradients<N: AsRef<[Val<'k, f32>]>>(
        &self,
        w: &Scope<'k, Group>,
        [p, d_p]: [&A; 2],
        delta: impl Fn(u32) -> N,
        slopes: &Slopes<'k>,
        after: impl Fn(u32),
    ) {
        let (p, elements): (Vec<_>, Vec<_>) = (p.elements().collect(), d_p.elements().collect());
        let (mut d_m, run) = (Vec::new(), A::RUN as usize);
        let each = run * A::ROWS;
        for eight in 0..d_p.cols() / 8 {
            let delta = delta(eight);
            for i in 0..each {
                let at = each * eight as usize + i;
                let x = p[at].eq(0.0).select::<f32>(0.0, (elements[at] - delta.as_ref()[i % run]) * p[at]);
                d_m.push(x);
                let d_z = match &slopes.score {
                    Some(slope) => p[at].eq(0.0).select::<f32>(0.0, x * slope[at]),
                    None => x,
                };
                d_p.set(at, d_z);
            }
            after(eight);
        }
        for (g, (at, _)) in self.aux.iter().enumerate() {
            let terms: Vec<Val<'k, f32>> = match &slopes.aux[g] {
                Some(slope) => d_m
                    .iter()
                    .zip(slope)
                    .zip(&p)
                    .map(|((x, slope), p)| p.eq(0.0).select::<f32>(0.0, *x * *slope))
                    .collect(),
                None => d_m.clone(),
            };
            let stays = at.iter().map(Function::stays).fold([true; 2], |[a, b], [c, d]| [a & c, b & d]);
            let places = self.places(w, g, d_p, slopes.first);
            self.add(w, &self.of.sums[g].0, &terms, &places, stays);
        }
    }

    /// Adds terms to elements. Terms of several lanes for one element are added up first.
    fn add(
        &self,
        w: &Scope<'k, Group>,
        to: &Sums<'k>,
        terms: &[Val<'k, f32>],
        places: &[Val<'k, u64>],
        [same_cols, same_rows]: [bool; 2],
    ) {
        let sum = |pick: &dyn Fn(usize) -> bool| {
            let picked = (0..terms.len()).filter(|&i| pick(i)).map(|i| terms[i]);
            picked.reduce(|a, b| a + b).expect("bug in fulgurite: a block without elements")
        };
        let plus = |a: Val<'k, f32>, b: Val<'k, f32>| a + b;
        let first_of = |pick: &dyn Fn(usize) -> bool| places[(0..places.len()).find(|&i| pick(i)).unwrap_or(0)];
        match (same_cols, same_rows) {
            (true, true) => {
                let total = w.reduce(sum(&|_| true), 32, plus);
                w.when(w.lane().eq(0), |w| to.add(w, places[0], total));
            }
            (true, false) => (0..A::ROWS).for_each(|row| {
                let of_row = |i: usize| A::row_of(i) == row;
                let total = w.reduce(sum(&of_row), A::LANES, plus);
                w.when(A::first_col(w).eq(0), |w| to.add(w, first_of(&of_row), total));
            }),
            (false, true) => {
                let mut cols: Vec<u32> = (0..terms.len()).map(A::col_of).collect();
                cols.sort_unstable();
                cols.dedup();
                for col in cols {
                    let of_col = |i: usize| A::col_of(i) == col;
                    // Lanes that hold different rows have the same columns.
                    let others = [1, 2, 4, 8, 16].into_iter().filter(|bits| *bits >= A::LANES);
                    let total = others.fold(sum(&of_col), |x, bits| x + w.exchange(x, bits));
                    w.when(w.lane().lt(A::LANES), |w| to.add(w, first_of(&of_col), total));
                }
            }
            (false, false) => terms.iter().zip(places).for_each(|(&x, &at)| to.add(w, at, x)),
        }
    }
}
