//! The tensors of a file by their roles in a call.

use crate::Failure;
use crate::args::RunArgs;
use crate::io::{Stored, Tensors};
use crate::variants::args::Op;
use fulgurite::{Attention, DType, Tensor, attention};
use serde::Serialize;

/// The names that are read; others are left alone and named.
pub(crate) const KNOWN: [&str; 17] = [
    "q",
    "k",
    "v",
    "d_o",
    "d_lse",
    "sink",
    "sinks",
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "used_q",
    "used_k",
    "alibi_slopes",
    "bias",
    "documents_q",
    "documents_k",
    "prefix_lengths",
];

/// A tensor without elements may claim any shape; work and memory are spent only on believable ones.
const MAX_HEADS: usize = 1 << 22;
const MAX_ALIBI_HEADS: usize = 1 << 16;

/// Name, type and shape of a tensor, as `run` reports it.
#[derive(Serialize)]
pub(crate) struct Shape {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
}

/// Describes a tensor.
pub(crate) fn shape(name: &str, tensor: &Tensor) -> Shape {
    Shape { name: name.into(), dtype: tensor.dtype().to_string(), shape: tensor.shape().to_vec() }
}

/// The tensors of the file by their roles.
pub(crate) struct Given<'a> {
    pub q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    pub d_o: Option<&'a Tensor>,
    pub d_lse: Option<&'a Tensor>,
    sinks: Option<&'a Tensor>,
    cu_seqlens: Option<[&'a Tensor; 2]>,
    used_q: Option<&'a Tensor>,
    used_k: Option<&'a Tensor>,
    alibi_slopes: Option<Tensor>,
    bias: Option<&'a Tensor>,
    documents: Option<[&'a Tensor; 2]>,
    prefix_lengths: Option<&'a Tensor>,
}

impl<'a> Given<'a> {
    pub fn new(tensors: &'a Tensors, args: &RunArgs) -> Result<Given<'a>, Failure> {
        let file = args.input.display();
        let float = |name: &str| float(tensors, name);
        let integer = |name: &str| get(tensors, name, "i32, i64", |dtype| dtype == DType::I32);
        let needed = |name: &'static str| needed(tensors, args, name);
        let both = |names: [&'static str; 2]| match (integer(names[0])?, integer(names[1])?) {
            (Some(q), Some(k)) => Ok(Some([q, k])),
            (None, None) => Ok(None),
            (q, _) => {
                let (has, misses) = if q.is_some() { (names[0], names[1]) } else { (names[1], names[0]) };
                Err(Failure::input(format_args!("{file} has `{has}` without `{misses}`; give both or none")))
            }
        };
        let (q, k, v) = (needed("q")?, needed("k")?, needed("v")?);
        let cu_seqlens = match (both(["cu_seqlens_q", "cu_seqlens_k"])?, integer("cu_seqlens")?) {
            (Some(_), Some(_)) => {
                let text = format_args!("{file} has `cu_seqlens` and `cu_seqlens_q`; give one or the other");
                return Err(Failure::input(text));
            }
            (two, one) => two.or(one.map(|both| [both, both])),
        };
        let (d_o, d_lse) = (float("d_o")?, float("d_lse")?);
        if d_lse.is_some() && d_o.is_none() {
            return Err(Failure::input(format_args!("{file} has `d_lse` without `d_o`; give zeros for `d_o`")));
        }
        let sinks = match (float("sink")?, float("sinks")?) {
            (Some(_), Some(_)) => {
                return Err(Failure::input(format_args!("{file} has `sink` and `sinks`; give one or the other")));
            }
            (one, other) => one.or(other),
        };
        let alibi_slopes = match float("alibi_slopes")? {
            Some(slopes) => Some(in_f32(slopes)?),
            None if args.alibi => Some(usual_slopes(q)?),
            None => None,
        };
        Ok(Given {
            q,
            k,
            v,
            d_o,
            d_lse,
            sinks,
            cu_seqlens,
            used_q: integer("used_q")?,
            used_k: integer("used_k")?,
            alibi_slopes,
            bias: float("bias")?,
            documents: both(["documents_q", "documents_k"])?,
            prefix_lengths: integer("prefix_lengths")?,
        })
    }

    /// Refuses a gradient of lse, which only attention has.
    pub fn no_d_lse(&self) -> Result<(), Failure> {
        match self.d_lse {
            None => Ok(()),
            Some(_) => Err(Failure::input("the file has `d_lse`, allowed: d_o alone; leave it out")),
        }
    }

    /// The call that the file and the flags describe together.
    pub fn call(&'a self, args: &RunArgs) -> Result<Attention<'a>, Failure> {
        let mut call = attention(self.q, self.k, self.v).exp(args.exp).precision(args.precision);
        if let Some(lengths) = self.prefix_lengths {
            call = call.prefix(lengths); // causal after the prefix, with or without the flag
        } else if args.causal {
            call = call.causal();
        }
        if let Some(window) = args.window {
            call = call.window(window.left, window.right);
        }
        if let Some([q, k]) = self.documents {
            call = call.documents(q, k);
        }
        if let Some(scale) = args.scale {
            call = call.scale(scale);
        }
        if let Some(cap) = args.softcap {
            call = call.softcap(cap);
        }
        if let Some(slopes) = &self.alibi_slopes {
            call = call.alibi(slopes);
        }
        if let Some(bias) = self.bias {
            call = if self.d_o.is_some() { call.bias_with_grad(bias) } else { call.bias(bias) };
        }
        if let Some(sinks) = self.sinks {
            call = call.sinks(sinks);
        }
        if let Some([q, k]) = self.cu_seqlens {
            call = call.cu_seqlens(q, k);
        }
        if let Some(lengths) = self.used_q {
            call = call.used_q(lengths);
        }
        if let Some(lengths) = self.used_k {
            call = call.used_k(lengths);
        }
        let problem = call.problem()?;
        let work = problem.batch().saturating_mul(problem.q_heads());
        if work > MAX_HEADS {
            let (batch, heads) = (problem.batch(), problem.q_heads());
            let text =
                format_args!("`q` has {batch} sequences of {heads} heads, allowed: {MAX_HEADS} heads in all; split it");
            return Err(Failure::input(text));
        }
        Ok(call)
    }

    pub fn shapes(&self, tensors: &Tensors) -> Vec<Shape> {
        let read = tensors.iter().filter(|(name, _)| KNOWN.contains(&name.as_str()));
        read.filter_map(|(name, stored)| match stored {
            Stored::Tensor(tensor) => Some(shape(name, tensor)),
            Stored::Other(_) => None,
        })
        .collect()
    }
}

/// A tensor of the file that there must be.
pub(crate) fn needed<'a>(tensors: &'a Tensors, args: &RunArgs, name: &'static str) -> Result<&'a Tensor, Failure> {
    float(tensors, name)?.ok_or_else(|| {
        let has = tensors.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let needed = match args.op {
            Op::Attention | Op::Lighthouse => "q, k and v",
            Op::Parallax => "q, r, k and v",
            Op::GatedDelta => "q, k, v, g and beta",
        };
        let file = args.input.display();
        Failure::input(format_args!("{file} has no tensor `{name}`, it has: {has}; {needed} are needed"))
    })
}

/// A tensor of floats, if it is there.
pub(crate) fn float<'a>(tensors: &'a Tensors, name: &str) -> Result<Option<&'a Tensor>, Failure> {
    get(tensors, name, "f32, f16, bf16", DType::is_float)
}

/// A tensor of the file, if it is there, of an allowed type.
pub(crate) fn get<'a>(
    tensors: &'a Tensors,
    name: &str,
    allowed: &str,
    fits: impl Fn(DType) -> bool,
) -> Result<Option<&'a Tensor>, Failure> {
    let wrong = |got: &str| Failure::input(format_args!("`{name}` is {got}, allowed: {allowed}; convert it"));
    match tensors.get(name) {
        None => Ok(None),
        Some(Stored::Other(dtype)) => Err(wrong(dtype)),
        Some(Stored::Tensor(tensor)) if fits(tensor.dtype()) => Ok(Some(tensor)),
        Some(Stored::Tensor(tensor)) => Err(wrong(tensor.dtype().name())),
    }
}

fn in_f32(tensor: &Tensor) -> Result<Tensor, Failure> {
    let values = tensor.view().to_f64();
    Ok(Tensor::from_f64(DType::F32, &values, tensor.shape()).map_err(fulgurite::Error::from)?)
}

/// 2^(-8 (h + 1) / heads), the slopes of the ALiBi paper. What is no q is refused later.
fn usual_slopes(q: &Tensor) -> Result<Tensor, Failure> {
    let heads = q.shape().len().checked_sub(2).map_or(0, |axis| q.shape()[axis]);
    if heads > MAX_ALIBI_HEADS {
        let text = format_args!("`q` has {heads} heads, allowed with --alibi: {MAX_ALIBI_HEADS}; give `alibi_slopes`");
        return Err(Failure::input(text));
    }
    let slopes: Vec<f32> = (0..heads).map(|h| (-8.0 * (h + 1) as f32 / heads as f32).exp2()).collect();
    Ok(Tensor::new(slopes, &[heads]).map_err(fulgurite::Error::from)?)
}
