//! What a call asks for, as text: everything but the tensors, and so the key of what is prepared for it.
//!
//! Entries are separated by `;`, words by spaces. The text is complete: it may be stored in a compiled graph and read
//! by another process. `fulgurite/_describe.py` writes it.
//!
//! ```text
//! causal bottom-right | top-left      window LEFT RIGHT (- is unbounded)     scale X      softcap X
//! tuning groups=N cols=N ... (of a GPU kernel: for measurements)
//! exp NAME   engine NAME   threads N   rescale NAME   order fixed            blocks ROWS COLS
//! score EXPRESSION   mask EXPRESSION   (see `expression`)
//! with ROLE [NAME] [grad]             one for each tensor that comes beside q, k and v, in their order
//! ```

use crate::array::{Array, wrong};
use crate::cuda::{self, Compiled};
use crate::expression;
use fulgurite::gpu::{ForwardConfig, Order};
use fulgurite::{BlockSpec, Choice, Engine, Exp, Expr, Mask, Problem, Rescale, Settings};
use fulgurite_core::problem::ALIBI_SLOPES;
use fulgurite_core::{Packed, TensorView};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::fmt::Display;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

/// What a tensor beside q, k and v is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// A logit for each head.
    Sinks,
    /// Cumulative offsets of queries.
    CuQ,
    /// Cumulative offsets of keys.
    CuK,
    /// Queries in use.
    UsedQ,
    /// Keys in use.
    UsedK,
    /// Lists of a block mask: how many partial blocks, which; how many full blocks, which.
    Blocks(usize),
    /// A tensor that modifiers read; ALiBi's slopes, masks and bias are among them.
    Aux {
        /// Its name in expressions and messages.
        name: String,
        /// Whether backward gives its gradient.
        grad: bool,
    },
}

/// Names of the lists of a block mask, in order.
pub const BLOCK_LISTS: [&str; 4] = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"];

impl Role {
    /// The name in messages.
    pub fn name(&self) -> &str {
        match self {
            Role::Sinks => "sinks",
            Role::CuQ => "cu_seqlens_q",
            Role::CuK => "cu_seqlens_k",
            Role::UsedQ => "used_q",
            Role::UsedK => "used_k",
            Role::Blocks(list) => BLOCK_LISTS[*list],
            Role::Aux { name, .. } => name,
        }
    }

    fn parse(words: &[&str]) -> Result<Role, String> {
        let list = |name| BLOCK_LISTS.iter().position(|list| *list == name);
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

/// Problems that are kept for one description; beyond it they are forgotten all at once.
pub const MAX_PROBLEMS: usize = 512;

/// A description that was read, its engine, and the problems that were built for it so far.
#[pyclass(frozen)]
pub struct Description {
    mask: Mask,
    score: Option<Expr>,
    scale: Option<f32>,
    softcap: Option<f32>,
    exp: Option<Exp>,
    blocks: Option<[usize; 2]>,
    /// One for each tensor beside q, k and v.
    pub roles: Vec<Role>,
    /// Who computes where arrays lie in memory of the host.
    pub engine: Box<dyn Engine>,
    /// What the caller asked for.
    pub choice: Choice,
    pub rescale: Option<Rescale>,
    pub tuning: Option<ForwardConfig>,
    /// In which order a GPU adds up gradients.
    pub order: Order,
    /// What was compiled for arrays on a GPU.
    pub compiled: Compiled,
    problems: Mutex<HashMap<Vec<usize>, Arc<Problem>>>,
}

fn number<T: FromStr>(key: &str, text: &str) -> Result<T, String>
where
    T::Err: Display,
{
    text.parse().map_err(|e| format!("`{key}` is {text:?}: {e}"))
}

impl Description {
    /// Reads the text.
    pub fn parse(text: &str) -> Result<Description, String> {
        let (mut mask, mut score, mut scale, mut softcap) = (Mask::none(), None, None, None);
        let (mut exp, mut blocks, mut roles) = (None, None, Vec::new());
        let (mut choice, mut settings, mut rescale, mut tuning) = (Choice::Best, Settings::default(), None, None);
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
                ("engine", [name]) => choice = name.parse::<Choice>().map_err(|e| say(&e))?,
                ("threads", [n]) => {
                    // A negative number is as wrong as 0, and gets its message.
                    settings = settings.threads(number::<i64>(key, n)?.max(0) as usize);
                }
                ("rescale", [name]) => {
                    let policy = name.parse::<Rescale>().map_err(|e| say(&e))?;
                    (settings, rescale) = (settings.rescale(policy), Some(policy));
                }
                ("order", ["fixed"]) => settings = settings.order(Order::Fixed),
                ("tuning", _) => tuning = Some(rest.parse::<ForwardConfig>().map_err(|e| say(&e))?),
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
        let engine = fulgurite::engine_with(choice, &settings).map_err(|e| say(&e))?;
        let problems = Mutex::new(HashMap::new());
        let compiled = Compiled::default();
        Ok(Description {
            mask,
            score,
            scale,
            softcap,
            exp,
            blocks,
            roles,
            engine,
            choice,
            rescale,
            tuning,
            order: settings.order,
            compiled,
            problems,
        })
    }

    /// How the blocks of the block mask lie, if there is one.
    pub fn block_spec(&self, extras: &[Array]) -> PyResult<Option<BlockSpec>> {
        let Some([rows, cols]) = self.blocks else { return Ok(None) };
        let lists = self.roles.iter().zip(extras).find(|(role, _)| **role == Role::Blocks(0));
        match lists.map(|(_, array)| array.shape()) {
            Some(&[batch, heads, _]) => Ok(Some(BlockSpec { rows, cols, batch, heads })),
            other => Err(wrong(format!("`kv_num_blocks` has shape {other:?}, allowed: [batch, heads, query blocks]"))),
        }
    }

    /// The problem that these arrays and this description make, built the first time.
    pub fn problem(&self, [q, k, v]: [&Array; 3], extras: &[Array]) -> PyResult<Arc<Problem>> {
        let packed = self.packed(q, k, extras)?;
        let mut key = Vec::with_capacity(16 + 8 * extras.len());
        for array in [q, k, v].into_iter().chain(extras) {
            let element = array.element();
            key.push(array.shape().len() << 16 | usize::from(element.code) << 8 | usize::from(element.bits));
            key.extend_from_slice(array.shape());
        }
        if let Some(packed) = packed {
            key.extend([packed.batch, packed.max_q, packed.max_k]);
        }
        let mut problems = self.problems.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(problem) = problems.get(&key) {
            return Ok(problem.clone());
        }
        let problem = Arc::new(self.build([q, k, v], extras, packed)?);
        if problems.len() >= MAX_PROBLEMS {
            problems.clear();
        }
        problems.insert(key, problem.clone());
        Ok(problem)
    }

    /// Sizes of a packed batch, read from its offsets; `None` where the batch is dense.
    fn packed(&self, q: &Array, k: &Array, extras: &[Array]) -> PyResult<Option<Packed>> {
        let find = |role| self.roles.iter().zip(extras).find(|(other, _)| **other == role).map(|(_, array)| array);
        match (find(Role::CuQ), find(Role::CuK)) {
            (None, None) => Ok(None),
            // Offsets on a device are not read: no sequence is longer than all of them.
            (Some(cu_q), Some(_)) if cuda::number(q).is_some() => {
                let rows = |array: &Array| array.shape().first().copied().unwrap_or(0);
                let batch = cu_q.shape().first().copied().unwrap_or(0).saturating_sub(1);
                let (total_q, total_k) = (rows(q), rows(k));
                Ok(Some(Packed { batch, total_q, total_k, max_q: total_q, max_k: total_k }))
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

    fn build(&self, [q, k, v]: [&Array; 3], extras: &[Array], packed: Option<Packed>) -> PyResult<Problem> {
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
                // The builder declares it and comes before every other modifier but softcap.
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
        builder.build().map_err(|e| wrong(e.to_string()))
    }
}

/// Number of sequences and the longest, of offsets that nobody has checked yet: binding them to the problem does.
fn lengths(offsets: &TensorView<'_>) -> (usize, usize) {
    let offsets = offsets.to_f64();
    let longest = offsets.windows(2).map(|pair| (pair[1] - pair[0]).max(0.0) as usize).max();
    (offsets.len().saturating_sub(1), longest.unwrap_or(0))
}
