//! The description of a call as text: everything but the tensors. It is also the key of prepared calls.
//!
//! Entries are separated by `;`, words by spaces. The text is complete: it may be stored in a compiled graph and read
//! by another process. `fulgurite/_describe.py` writes it.
//!
//! ```text
//! causal bottom-right | top-left      window LEFT RIGHT (- is unbounded)     scale X      softcap X
//! tuning groups=N cols=N ...   sync_tuning blocks=N cols=N ...   (of a GPU kernel: for measurements)
//! backward head_splits=N pairs=N ... (changes of the configuration that gradients have on a GPU: for measurements)
//! precision NAME (of the products: int8, nvfp4, ...)
//! exp NAME   engine NAME   threads N   rescale NAME   order fixed            blocks ROWS COLS
//! longest Q K (upper bounds of the lengths of packed sequences, - is unknown: a GPU cannot read its offsets)
//! score EXPRESSION   mask EXPRESSION   (see `expression`)
//! with ROLE [NAME] [grad]             one for each tensor that comes beside q, k and v, in their order
//! ```

use crate::array::{Array, wrong};
use crate::expression;
use crate::recent::RecentCalls;
use fulgurite::gpu::{BackwardConfig, DECODE_ROWS, ForwardConfig, Order, ProfileSource, SyncConfig};
use fulgurite::{
    BlockLists, BlockSpec, Choice, Engine, Exp, Expr, GradientOutputs, Inputs, Mask, Precision, Problem,
    ProblemBuilder, Rescale, Settings, TensorViewMut,
};
use fulgurite_core::lru::Lru;
use fulgurite_core::problem::ALIBI_SLOPES;
use fulgurite_core::{Packed, TensorView};
use pyo3::prelude::*;
use std::fmt::Display;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

/// The purpose of a tensor besides q, k and v.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// Sink logits, one per head.
    Sinks,
    /// Cumulative offsets of queries.
    CuQ,
    /// Cumulative offsets of keys.
    CuK,
    /// Number of queries in use per sequence.
    UsedQ,
    /// Number of keys in use per sequence.
    UsedK,
    /// One of the four lists of a block mask: number of partial blocks, partial blocks, number of full blocks, full
    /// blocks.
    Blocks(usize),
    /// A tensor that modifiers read, including ALiBi's slopes, masks and biases.
    Aux {
        /// Name in expressions and messages.
        name: String,
        /// Whether backward computes its gradient.
        grad: bool,
    },
}

impl Role {
    /// The name in messages.
    pub fn name(&self) -> &str {
        match self {
            Role::Sinks => "sinks",
            Role::CuQ => "cu_seqlens_q",
            Role::CuK => "cu_seqlens_k",
            Role::UsedQ => "used_q",
            Role::UsedK => "used_k",
            Role::Blocks(list) => BlockLists::NAMES[*list],
            Role::Aux { name, .. } => name,
        }
    }

    fn parse(words: &[&str]) -> Result<Role, String> {
        let list = |name| BlockLists::NAMES.iter().position(|list| *list == name);
        Ok(match *words {
            ["sinks"] => Role::Sinks,
            ["cu_seqlens_q"] => Role::CuQ,
            ["cu_seqlens_k"] => Role::CuK,
            ["used_q"] => Role::UsedQ,
            ["used_k"] => Role::UsedK,
            ["aux", name] => Role::Aux { name: name.into(), grad: false },
            ["aux", name, "grad"] => Role::Aux { name: name.into(), grad: true },
            [name] if list(name).is_some() => Role::Blocks(list(name).unwrap_or_default()),
            _ => return Err(format!("description has the unknown tensor `{}`", words.join(" "))),
        })
    }
}

/// Number of problems that are kept for one description; the least recently used one is dropped first.
const MAX_PROBLEMS: usize = 512;

/// A parsed description, its engine, and the problems that were built for it so far.
#[pyclass(frozen)]
pub struct Description {
    mask: Mask,
    score: Option<Expr>,
    scale: Option<f32>,
    softcap: Option<f32>,
    exp: Option<Exp>,
    precision: Precision,
    blocks: Option<[usize; 2]>,
    /// One role for each tensor besides q, k and v.
    pub roles: Vec<Role>,
    /// The engine for arrays in host memory.
    pub engine: Box<dyn Engine>,
    /// The choice of the caller.
    pub choice: Choice,
    /// The settings of the engine.
    pub settings: Settings,
    pub rescale: Option<Rescale>,
    pub tuning: Option<ForwardConfig>,
    pub sync_tuning: Option<SyncConfig>,
    /// Changes of the configuration of gradients on a GPU, as text that was read once.
    pub backward: Option<String>,
    /// In which order a GPU adds up gradients.
    pub order: Order,
    /// Upper bounds of the lengths of packed queries and keys, if the caller gave them.
    longest: [Option<usize>; 2],
    /// The problems of the last calls, by the types and shapes of their arrays.
    recent: Mutex<Lru<(Vec<usize>, Arc<Problem>)>>,
    /// The last calls on GPUs.
    pub recent_calls: RecentCalls,
}

fn number<T: FromStr>(key: &str, text: &str) -> Result<T, String>
where
    T::Err: Display,
{
    text.parse().map_err(|e| format!("`{key}` is {text:?}: {e}"))
}

/// The gradients of a call, by the tensors that have them.
pub struct GradientFields<T> {
    /// Of q, k and v.
    pub rows: [T; 3],
    /// Of the sinks.
    pub d_sinks: Option<T>,
    /// Of each auxiliary tensor of the problem.
    pub d_aux: Vec<Option<T>>,
}

impl Description {
    /// Parses the text.
    pub fn parse(text: &str) -> Result<Description, String> {
        let (mut mask, mut score, mut scale, mut softcap) = (Mask::none(), None, None, None);
        let (mut exp, mut blocks, mut roles, mut longest) = (None, None, Vec::new(), [None; 2]);
        let (mut choice, mut settings, mut rescale, mut tuning) = (Choice::Best, Settings::default(), None, None);
        let (mut backward, mut sync_tuning, mut precision) = (None, None, Precision::Native);
        let say = |e: &dyn Display| e.to_string();
        for entry in text.split(';').filter(|entry| !entry.is_empty()) {
            let (key, rest) = entry.split_once(' ').unwrap_or((entry, ""));
            let words: Vec<&str> = rest.split_ascii_whitespace().collect();
            match (key, &words[..]) {
                ("causal", ["bottom-right"]) => mask = mask.and(Mask::causal()),
                ("causal", ["top-left"]) => mask = mask.and(Mask::causal_top_left()),
                ("causal", _) => {
                    return Err(format!("`causal` is {rest:?}, allowed: True, False, \"bottom-right\", \"top-left\""));
                }
                ("window", [left, right]) => {
                    let side =
                        |text: &str| if text == "-" { Ok(None) } else { number::<i64>("window", text).map(Some) };
                    mask = mask.and(Mask::window(side(left)?, side(right)?));
                }
                ("scale", [x]) => scale = Some(number::<f64>(key, x)? as f32),
                ("softcap", [x]) => softcap = Some(number::<f64>(key, x)? as f32),
                ("exp", [name]) => exp = Some(name.parse::<Exp>().map_err(|e| say(&e))?),
                ("precision", [name]) => precision = name.parse::<Precision>().map_err(|e| say(&e))?,
                ("engine", [name]) => choice = name.parse::<Choice>().map_err(|e| say(&e))?,
                ("threads", [n]) => {
                    // A negative number is as wrong as 0, and gets the same message.
                    settings = settings.threads(number::<i64>(key, n)?.max(0) as usize);
                }
                ("rescale", [name]) => {
                    let policy = name.parse::<Rescale>().map_err(|e| say(&e))?;
                    (settings, rescale) = (settings.rescale(policy), Some(policy));
                }
                ("order", ["fixed"]) => settings = settings.order(Order::Fixed),
                ("tuning", _) => tuning = Some(rest.parse::<ForwardConfig>().map_err(|e| say(&e))?),
                ("sync_tuning", _) => sync_tuning = Some(rest.parse::<SyncConfig>().map_err(|e| say(&e))?),
                ("backward", _) => {
                    rest.parse::<BackwardConfig>().map_err(|e| say(&e))?;
                    backward = Some(rest.to_string());
                }
                ("longest", [q, k]) => {
                    let bound = |text: &str| if text == "-" { Ok(None) } else { number::<usize>(key, text).map(Some) };
                    longest = [bound(q)?, bound(k)?];
                }
                ("blocks", [rows, cols]) => blocks = Some([number(key, rows)?, number(key, cols)?]),
                ("score", _) => {
                    let outer = expression::parse(rest)?;
                    score = Some(score.map_or(outer.clone(), |inner: Expr| outer.after(&inner)));
                }
                ("mask", _) => mask = mask.and(Mask::custom(expression::parse(rest)?)),
                ("with", words) => roles.push(Role::parse(words)?),
                _ => return Err(format!("description has the unknown entry {entry:?}")),
            }
        }
        let settings = settings.profile(ProfileSource::usual(&|name| std::env::var_os(name)));
        let engine = fulgurite::engine_with(choice, &settings).map_err(|e| say(&e))?;
        Ok(Description {
            mask,
            score,
            scale,
            softcap,
            exp,
            precision,
            blocks,
            roles,
            engine,
            choice,
            rescale,
            tuning,
            sync_tuning,
            backward,
            order: settings.order,
            settings,
            longest,
            recent: Mutex::new(Lru::new(MAX_PROBLEMS)),
            recent_calls: RecentCalls::default(),
        })
    }

    /// The block size and shape of the block mask, if there is one.
    pub fn block_spec(&self, extras: &[Array]) -> PyResult<Option<BlockSpec>> {
        let Some([rows, cols]) = self.blocks else { return Ok(None) };
        let lists = self.roles.iter().zip(extras).find(|(role, _)| **role == Role::Blocks(0));
        match lists.map(|(_, array)| array.shape()) {
            Some(&[batch, heads, _]) => Ok(Some(BlockSpec { rows, cols, batch, heads })),
            other => Err(wrong(format!("`kv_num_blocks` has shape {other:?}, allowed: [batch, heads, query blocks]"))),
        }
    }

    /// The inputs of a call, from the views of q, k and v and of the extra tensors in the order of [`roles`](Self::roles), and
    /// the lists of a block mask: host memory and a GPU take these in different forms.
    pub fn inputs<'a>(
        &'a self,
        [q, k, v]: [TensorView<'a>; 3],
        extras: impl Iterator<Item = PyResult<TensorView<'a>>>,
    ) -> PyResult<(Inputs<'a>, [Option<TensorView<'a>>; 4])> {
        let mut inputs = Inputs::new(q, k, v);
        let mut lists = [None; 4];
        for (role, view) in self.roles.iter().zip(extras) {
            let view = view?;
            match role {
                Role::Sinks => inputs.sinks = Some(view),
                Role::CuQ => inputs.cu_seqlens_q = Some(view),
                Role::CuK => inputs.cu_seqlens_k = Some(view),
                Role::UsedQ => inputs.used_q = Some(view),
                Role::UsedK => inputs.used_k = Some(view),
                Role::Blocks(list) => lists[*list] = Some(view),
                Role::Aux { name, .. } => inputs.aux.push((name, view)),
            }
        }
        Ok((inputs, lists))
    }

    /// The gradients of a call as the outputs of an engine.
    pub fn gradient_outputs<'a>(
        &self,
        problem: &Problem,
        views: impl Iterator<Item = PyResult<TensorViewMut<'a>>>,
    ) -> PyResult<GradientOutputs<'a>> {
        let GradientFields { rows: [d_q, d_k, d_v], d_sinks, d_aux } = self.gradient_fields(problem, views)?;
        Ok(GradientOutputs { d_q, d_k, d_v, d_sinks, d_aux })
    }

    /// The gradients of a call, in the order of [`Call::gradients`](crate::dispatch::Call::gradients), each assigned to
    /// its field.
    pub fn gradient_fields<T>(
        &self,
        problem: &Problem,
        mut gradients: impl Iterator<Item = PyResult<T>>,
    ) -> PyResult<GradientFields<T>> {
        let mut next = || gradients.next().unwrap_or_else(|| Err(wrong("a gradient is missing")));
        let rows = [next()?, next()?, next()?];
        let mut d_aux: Vec<_> = problem.aux().iter().map(|_| None).collect();
        let mut d_sinks = None;
        for role in &self.roles {
            match role {
                Role::Sinks => d_sinks = Some(next()?),
                Role::Aux { name, grad: true } => {
                    let at = problem.aux().iter().position(|spec| *spec.name == **name);
                    d_aux[at.expect("bug in fulgurite: each was declared")] = Some(next()?);
                }
                _ => {}
            }
        }
        Ok(GradientFields { rows, d_sinks, d_aux })
    }

    /// The problem of these arrays and this description, built on first use.
    pub fn problem(&self, [q, k, v]: [&Array; 3], extras: &[Array]) -> PyResult<Arc<Problem>> {
        let packed = self.packed(q, k, extras)?;
        let type_word = |array: &Array| {
            let element = array.element();
            array.shape().len() << 16 | usize::from(element.code) << 8 | usize::from(element.bits)
        };
        let arrays = [q, k, v].into_iter().chain(extras);
        let words = arrays.flat_map(|array| std::iter::once(type_word(array)).chain(array.shape().iter().copied()));
        let words = words.chain(packed.iter().flat_map(|packed| [packed.batch, packed.max_q, packed.max_k]));
        let mut recent = self.recent.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((_, problem)) = recent.find(|(key, _)| key.iter().copied().eq(words.clone())) {
            return Ok(problem.clone());
        }
        let problem = Arc::new(self.build([q, k, v], extras, packed)?);
        recent.insert((words.collect(), problem.clone()));
        Ok(problem)
    }

    /// Sizes of a packed batch, read from its offsets; `None` for a dense batch.
    fn packed(&self, q: &Array, k: &Array, extras: &[Array]) -> PyResult<Option<Packed>> {
        let find = |role| self.roles.iter().zip(extras).find(|(other, _)| **other == role).map(|(_, array)| array);
        match (find(Role::CuQ), find(Role::CuK)) {
            (None, None) => Ok(None),
            // Offsets on a device are not read back.
            (Some(cu_q), Some(_)) if q.gpu().is_some() => {
                let rows = |array: &Array| array.shape().first().copied().unwrap_or(0);
                let batch = cu_q.shape().first().copied().unwrap_or(0).saturating_sub(1);
                let (total_q, total_k) = (rows(q), rows(k));
                let heads = |array: &Array| array.shape().get(1).copied().unwrap_or(0);
                let [max_q, max_k] = self.bounds([total_q, total_k], heads(q) / heads(k).max(1));
                Ok(Some(Packed { batch, total_q, total_k, max_q, max_k }))
            }
            (Some(cu_q), Some(cu_k)) => {
                let claims = &mut Default::default();
                let (batch, max_q) = lengths(&cu_q.view("cu_seqlens_q", claims)?);
                let (_, max_k) = lengths(&cu_k.view("cu_seqlens_k", claims)?);
                let rows = |array: &Array| array.shape().first().copied().unwrap_or(0);
                Ok(Some(Packed { batch, total_q: rows(q), total_k: rows(k), max_q, max_k }))
            }
            _ => Err(wrong("`cu_seqlens_q` and `cu_seqlens_k` belong together; give both or neither")),
        }
    }

    /// Upper bounds of the lengths of packed sequences on a GPU; `group` is the number of query heads per key/value
    /// head.
    ///
    /// The caller's bound of the queries counts if they are few enough for the decode kernel. The totals remain the bounds
    /// of all other calls, which gain nothing from less, and of modifiers, whose indices are planned from the lengths.
    fn bounds(&self, [total_q, total_k]: [usize; 2], group: usize) -> [usize; 2] {
        if self.roles.iter().any(|role| matches!(role, Role::Aux { .. } | Role::Blocks(_))) {
            return [total_q, total_k];
        }
        let [q, k] = self.longest;
        let decodes = |q: &usize| q.saturating_mul(group.max(1)) <= DECODE_ROWS as usize;
        [q.filter(decodes).map_or(total_q, |q| q.min(total_q)), k.map_or(total_k, |k| k.min(total_k))]
    }

    fn build(&self, arrays: [&Array; 3], extras: &[Array], packed: Option<Packed>) -> PyResult<Problem> {
        let problem = self.describe(arrays, extras, packed)?.build().map_err(|e| wrong(e.to_string()))?;
        in_32_bits(problem.past_32_bits())?;
        Ok(problem)
    }

    /// The description of the problem of these arrays, to be completed.
    pub fn builder(&self, arrays: [&Array; 3], extras: &[Array]) -> PyResult<ProblemBuilder> {
        let packed = self.packed(arrays[0], arrays[1], extras)?;
        self.describe(arrays, extras, packed)
    }

    fn describe(&self, [q, k, v]: [&Array; 3], extras: &[Array], packed: Option<Packed>) -> PyResult<ProblemBuilder> {
        let (rank, layout) =
            if packed.is_some() { (3, "[total, heads, head_dim]") } else { (4, "[batch, sequence, heads, head_dim]") };
        for (arg, array) in [("q", q), ("k", k), ("v", v)] {
            if array.shape().len() != rank {
                return Err(wrong(format!("`{arg}` has shape {:?}, allowed: {layout}", array.shape())));
            }
        }
        let [.., q_heads, head_dim] = *q.shape() else { unreachable!("the rank was checked") };
        let [.., kv_heads, value_dim] = *v.shape() else { unreachable!("the rank was checked") };
        let has = |role| self.roles.contains(&role);
        let mut builder = Problem::builder()
            .heads(q_heads, kv_heads)
            .head_dims(head_dim, value_dim)
            .dtype(q.dtype("q")?)
            .mask(self.mask.clone())
            .used_lengths(has(Role::UsedQ), has(Role::UsedK));
        builder = match packed {
            Some(packed) => builder.packed_sizes(packed),
            None => builder.dense(q.shape()[0], q.shape()[1], k.shape()[1]),
        };
        if let Some(scale) = self.scale {
            builder = builder.scale(scale);
        }
        if let Some(softcap) = self.softcap {
            builder = builder.softcap(softcap);
        }
        if has(Role::Sinks) {
            builder = builder.sinks();
        }
        for (role, array) in self.roles.iter().zip(extras) {
            let Role::Aux { name, grad } = role else { continue };
            let dtype = array.dtype(name)?;
            builder = match name.as_str() {
                // The builder declares this tensor itself; ALiBi precedes every modifier except softcap.
                ALIBI_SLOPES => builder.alibi(),
                _ if *grad => builder.aux_with_grad(name, dtype, array.shape()),
                _ => builder.aux(name, dtype, array.shape()),
            };
        }
        if let Some(score) = &self.score {
            builder = builder.score_mod(score.clone());
        }
        if let Some(spec) = self.block_spec(extras)? {
            builder = builder.block_mask(spec);
        }
        if let Some(exp) = self.exp {
            builder = builder.exp(exp);
        }
        Ok(builder.precision(self.precision))
    }
}

/// Refuses an integer operation of a callable whose result may not fit: expressions compute with 32 bits and wrap, the
/// libraries whose arrays they index have 64.
pub fn in_32_bits(found: Option<(String, i64, i64)>) -> PyResult<()> {
    let Some((text, low, high)) = found else { return Ok(()) };
    Err(wrong(format!(
        "a mask or modifier computes {text}, from {low} to {high}, allowed: integers of 32 bits; reduce its operands \
         first, or index a table"
    )))
}

/// Number of sequences and the longest length, from offsets that are not validated yet; binding them to the problem
/// does that.
fn lengths(offsets: &TensorView<'_>) -> (usize, usize) {
    let offsets = offsets.to_f64();
    let longest = offsets.windows(2).map(|pair| (pair[1] - pair[0]).max(0.0) as usize).max();
    (offsets.len().saturating_sub(1), longest.unwrap_or(0))
}
