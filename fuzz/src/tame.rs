//! Problems out of a fuzzer's bytes on which engines must agree with the oracle: any structure, NaN and infinities in
//! hidden and visible rows, but numbers for which f32 is enough, and expressions without steps in the score.

use arbitrary::{Result, Unstructured};
use fulgurite_core::expr::{self, Expr, select};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Inputs, Mask, Problem, ProblemBuilder, Tensor};

/// Auxiliary tensors that expressions load from, both f32 with a gradient: one element for each head, and for each key.
const BY_HEAD: &str = "by_head";
const BY_KEY: &str = "by_key";

/// The tensors of a call.
pub struct Call {
    /// The problem.
    pub problem: Problem,
    tensors: [Tensor; 4],
    sinks: Option<Tensor>,
    used: [Option<Tensor>; 2],
    aux: Vec<(String, Tensor)>,
}

impl Call {
    /// The tensors of forward.
    pub fn inputs(&self) -> Inputs<'_> {
        let [q, k, v, _] = self.tensors.each_ref().map(Tensor::view);
        let [used_q, used_k] = self.used.each_ref().map(|used| used.as_ref().map(Tensor::view));
        let mut inputs = Inputs::new(q, k, v).used_lengths(used_q, used_k);
        inputs.sinks = self.sinks.as_ref().map(Tensor::view);
        for (name, tensor) in &self.aux {
            inputs = inputs.aux(name, tensor.view());
        }
        inputs
    }

    /// The gradient of o.
    pub fn d_o(&self) -> &Tensor {
        &self.tensors[3]
    }
}

/// A length: around a tile's size now and then, else small: the oracle takes most of the time.
fn length(u: &mut Unstructured<'_>) -> Result<usize> {
    let near = *u.choose(&[16usize, 32, 64, 128])?;
    match u.int_in_range(0..=15u8)? {
        0 => u.int_in_range(near - 2..=near + 2),
        1..=4 => u.int_in_range(0..=5),
        _ => u.int_in_range(1..=20),
    }
}

/// A smooth function of the score and the place of an element.
fn score_mod(u: &mut Unstructured<'_>, depth: u32) -> Result<Expr> {
    let constant = |u: &mut Unstructured<'_>| Ok(f32::from(u.int_in_range(-8i8..=8)?) / 4.0);
    let part = |u: &mut Unstructured<'_>| score_mod(u, depth - 1);
    if depth == 0 || u.is_empty() {
        return Ok(match u.int_in_range(0..=5u8)? {
            0 => constant(u)?.into(),
            1 => expr::load(BY_HEAD, vec![expr::head()]),
            2 => expr::load(BY_KEY, vec![expr::k()]),
            3 => 0.125 * (expr::q() - expr::k()).to_float(),
            _ => expr::score(),
        });
    }
    Ok(match u.int_in_range(0..=11u8)? {
        0 => part(u)? + part(u)?,
        1 => part(u)? - part(u)?,
        2 => part(u)? * constant(u)?,
        3 => part(u)?.tanh() * part(u)?.tanh(),
        4 => 4.0 * (part(u)? * 0.25).tanh(),
        5 => part(u)?.tanh().exp(),
        6 => (part(u)?.tanh() + 2.0).log(),
        7 => (part(u)?.tanh() + 2.0).sqrt(),
        8 => part(u)?.tanh() / (part(u)?.tanh() + 2.0),
        9 => select(mask_mod(u, 1)?, part(u)?, part(u)?),
        // -inf hides a key.
        10 => select(mask_mod(u, 1)?, part(u)?, f32::NEG_INFINITY),
        // A form without a value at score 0, which lanes that fill a tile have.
        _ => expr::score() + 0.125 * expr::score() * (expr::score() * expr::score()).log().tanh(),
    })
}

/// A condition on the place of an element.
fn mask_mod(u: &mut Unstructured<'_>, depth: u32) -> Result<Expr> {
    if depth > 0 && u.ratio(1, 2)? {
        let (a, b) = (mask_mod(u, depth - 1)?, mask_mod(u, depth - 1)?);
        return Ok(match u.int_in_range(0..=2u8)? {
            0 => a & b,
            1 => a | b,
            _ => !a,
        });
    }
    let n = i32::from(u.int_in_range(1u8..=40)?);
    Ok(match u.int_in_range(0..=4u8)? {
        0 => expr::k().less(n),
        1 => expr::q().less(n),
        2 => ((expr::q() + expr::k()) % n).less(n / 2 + 1),
        3 => (expr::q() / n).equals(expr::k() / n),
        _ => expr::head().less(1),
    })
}

fn mask(u: &mut Unstructured<'_>) -> Result<Mask> {
    let side = |u: &mut Unstructured<'_>| -> Result<Option<i64>> {
        if u.ratio(1, 4)? { Ok(None) } else { Ok(Some(u.int_in_range(-3..=40)?)) }
    };
    Ok(match u.int_in_range(0..=6u8)? {
        0 => Mask::none(),
        1 | 2 => Mask::causal(),
        3 => Mask::causal_top_left(),
        4 => Mask::window(side(u)?, side(u)?),
        5 => Mask::causal().or(Mask::custom(mask_mod(u, 2)?)),
        _ => Mask::custom(mask_mod(u, 2)?),
    })
}

/// A call, unless the bytes describe what no problem is.
pub fn call(u: &mut Unstructured<'_>) -> Result<Option<Call>> {
    let dtype = *u.choose(&DType::FLOATS)?;
    let (batch, q_len, k_len) = (1 + usize::from(u.ratio(1, 4)?), length(u)?, length(u)?);
    let (kv_heads, group) = (u.int_in_range(1..=2usize)?, *u.choose(&[1usize, 1, 1, 3])?);
    let heads = kv_heads * group;
    let dims = [u.int_in_range(1..=24usize)?, u.int_in_range(1..=24usize)?];
    let dims = if u.ratio(2, 3)? { [dims[0]; 2] } else { dims };
    let mut builder: ProblemBuilder = Problem::builder()
        .dense(batch, q_len, k_len)
        .heads(heads, kv_heads)
        .head_dims(dims[0], dims[1])
        .dtype(dtype)
        .mask(mask(u)?)
        .aux_with_grad(BY_HEAD, DType::F32, &[heads])
        .aux_with_grad(BY_KEY, DType::F32, &[k_len.max(1)]);
    if u.ratio(1, 2)? {
        builder = builder.score_mod(score_mod(u, 3)?);
    }
    let (has_sinks, used) = (u.ratio(1, 5)?, [u.ratio(1, 6)?, u.ratio(1, 6)?]);
    if has_sinks {
        builder = builder.sinks();
    }
    let Ok(problem) = builder.used_lengths(used[0], used[1]).build() else { return Ok(None) };
    let rng = &mut Rng::new(u.arbitrary()?);
    let lengths = |u: &mut Unstructured<'_>, n: usize| -> Result<Tensor> {
        let all = (0..batch).map(|_| u.int_in_range(0..=n as i32)).collect::<Result<Vec<i32>>>()?;
        Ok(Tensor::new(all, &[batch]).expect("one axis"))
    };
    let used_q = if used[0] { Some(lengths(u, q_len)?) } else { None };
    let used_k = if used[1] { Some(lengths(u, k_len)?) } else { None };
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
    let mut values: Vec<Vec<f64>> = shapes.iter().map(|shape| rng.normals(shape.iter().product(), 1.0)).collect();
    let planted = if u.ratio(1, 2)? { u.int_in_range(1..=3usize)? } else { 0 };
    for _ in 0..planted {
        plant(u, &mut values, &shapes)?;
    }
    let tensor = |values: &Vec<f64>, shape: &Vec<usize>| Tensor::from_f64(dtype, values, shape).expect("fits");
    let mut tensors = values.iter().zip(&shapes).map(|(values, shape)| tensor(values, shape));
    let tensors = [(); 4].map(|()| tensors.next().expect("four shapes"));
    let mut floats = |n: usize| Tensor::from_f64(DType::F32, &rng.normals(n, 1.0), &[n]).expect("one axis");
    let aux = problem.aux().iter().map(|spec| (spec.name.to_string(), floats(spec.shape[0]))).collect();
    let sinks = has_sinks.then(|| floats(heads));
    Ok(Some(Call { problem, tensors, sinks, used: [used_q, used_k], aux }))
}

/// Writes NaN or an infinity over an element or a row of q, k, v or d_o, which any row may or may not see.
fn plant(u: &mut Unstructured<'_>, values: &mut [Vec<f64>], shapes: &[Vec<usize>]) -> Result<()> {
    let at = u.int_in_range(0..=3usize)?;
    let (own, dim) = (&mut values[at], shapes[at].last().copied().unwrap_or(1));
    if own.is_empty() {
        return Ok(());
    }
    // An infinity in q or k makes a score NaN or infinite, depending on how a product is formed.
    let x = if at < 2 { f64::NAN } else { *u.choose(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY])? };
    let row = u.int_in_range(0..=own.len() / dim - 1)? * dim;
    let columns = if u.arbitrary()? { row..row + dim } else { row..row + 1 };
    own[columns].fill(x);
    Ok(())
}
