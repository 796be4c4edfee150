//! Problems, expressions and tensors out of a fuzzer's bytes: mostly plausible, sometimes wild.

#![deny(unsafe_code)]

#[allow(unsafe_code)] // an allocator
pub mod limit;
pub mod tame;

use arbitrary::{Result, Unstructured};
use fulgurite_core::expr::{self, Coverage, Env, Expr, select};
use fulgurite_core::{
    BlockMask, BlockSpec, Bound, DType, Exp, Mask, Packed, Problem, ProblemBuilder, Tensor, TensorView, bf16, f16,
};

/// Names of auxiliary tensors that expressions read; the builder declares some of them.
pub const NAMES: [&str; 4] = ["a", "b", "c", "prefix_lengths"];

/// A size: small nine times in ten, else anything.
pub fn size(u: &mut Unstructured<'_>) -> Result<usize> {
    match u.int_in_range(0..=19u8)? {
        0 => u.arbitrary(),
        1 => Ok(1usize << u.int_in_range(0..=63u32)?),
        _ => u.int_in_range(0..=9usize),
    }
}

/// A float: a few that matter, or any bits.
pub fn float(u: &mut Unstructured<'_>) -> Result<f32> {
    const SOME: [f32; 12] = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        30.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-40,
    ];
    if u.ratio(3, 4)? { Ok(*u.choose(&SOME)?) } else { u.arbitrary() }
}

fn int(u: &mut Unstructured<'_>) -> Result<i32> {
    if u.ratio(7, 8)? { Ok(i32::from(u.arbitrary::<i8>()?) % 12) } else { u.arbitrary() }
}

/// The type an expression is meant to have; one in sixteen does not.
#[derive(Clone, Copy)]
pub enum Wanted {
    /// A score.
    Float,
    /// An index.
    Int,
    /// A condition.
    Bool,
}

/// An expression of about the wanted type.
pub fn expression(u: &mut Unstructured<'_>, wanted: Wanted, depth: u32) -> Result<Expr> {
    let wanted = if u.ratio(1, 16)? { *u.choose(&[Wanted::Float, Wanted::Int, Wanted::Bool])? } else { wanted };
    let leaf = depth == 0 || u.is_empty();
    let part = |u: &mut Unstructured<'_>, wanted| expression(u, wanted, depth - 1);
    if !leaf && u.ratio(1, 8)? {
        let condition = part(u, Wanted::Bool)?;
        let yes = part(u, wanted)?;
        return Ok(select(condition, yes, part(u, wanted)?));
    }
    if !leaf && matches!(wanted, Wanted::Float | Wanted::Int) && u.ratio(1, 6)? {
        let name = *u.choose(&NAMES)?;
        let rank = u.int_in_range(0..=3usize)?;
        let at = (0..rank).map(|_| part(u, Wanted::Int)).collect::<Result<Vec<_>>>()?;
        return Ok(expr::load(name, at));
    }
    Ok(match wanted {
        Wanted::Float if leaf => {
            if u.arbitrary()? {
                expr::score()
            } else {
                float(u)?.into()
            }
        }
        Wanted::Float => {
            let x = part(u, Wanted::Float)?;
            match u.int_in_range(0..=12u8)? {
                0 => x + part(u, Wanted::Float)?,
                1 => x - part(u, Wanted::Float)?,
                2 => x * part(u, Wanted::Float)?,
                3 => x / part(u, Wanted::Float)?,
                4 => x.min(part(u, Wanted::Float)?),
                5 => x.max(part(u, Wanted::Float)?),
                6 => -x,
                7 => x.abs(),
                8 => x.exp(),
                9 => x.log(),
                10 => x.sqrt(),
                11 => x.tanh(),
                _ => part(u, Wanted::Int)?.to_float(),
            }
        }
        Wanted::Int if leaf => match u.int_in_range(0..=7u8)? {
            0 => expr::batch(),
            1 => expr::head(),
            2 => expr::q(),
            3 => expr::k(),
            4 => expr::q_len(),
            5 => expr::k_len(),
            _ => int(u)?.into(),
        },
        Wanted::Int => {
            let x = part(u, Wanted::Int)?;
            match u.int_in_range(0..=9u8)? {
                0 => x + part(u, Wanted::Int)?,
                1 => x - part(u, Wanted::Int)?,
                2 => x * part(u, Wanted::Int)?,
                3 => x / part(u, Wanted::Int)?,
                4 => x % part(u, Wanted::Int)?,
                5 => x.min(part(u, Wanted::Int)?),
                6 => x.max(part(u, Wanted::Int)?),
                7 => -x,
                8 => x.abs(),
                _ => part(u, Wanted::Float)?.floor(),
            }
        }
        Wanted::Bool if leaf => bool::into(u.arbitrary()?),
        Wanted::Bool => {
            let of = if u.arbitrary()? { Wanted::Int } else { Wanted::Float };
            match u.int_in_range(0..=6u8)? {
                0 => part(u, of)?.equals(part(u, of)?),
                1 => part(u, of)?.less(part(u, of)?),
                2 => part(u, of)?.at_most(part(u, of)?),
                3 => part(u, of)?.differs(part(u, of)?),
                4 => part(u, Wanted::Bool)? & part(u, Wanted::Bool)?,
                5 => part(u, Wanted::Bool)? | part(u, Wanted::Bool)?,
                _ => !part(u, Wanted::Bool)?,
            }
        }
    })
}

fn mask(u: &mut Unstructured<'_>, depth: u32) -> Result<Mask> {
    let side = |u: &mut Unstructured<'_>| -> Result<Option<i64>> {
        match u.int_in_range(0..=7u8)? {
            0 => Ok(None),
            1 => u.arbitrary(),
            _ => Ok(Some(i64::from(u.arbitrary::<i8>()?) % 8)),
        }
    };
    Ok(match u.int_in_range(0..=8u8)? {
        0 => Mask::none(),
        1 => Mask::causal(),
        2 => Mask::causal_top_left(),
        3 => Mask::window(side(u)?, side(u)?),
        4 => Mask::prefix(),
        5 => Mask::documents(),
        6 if depth > 0 => mask(u, depth - 1)?.and(mask(u, depth - 1)?),
        7 if depth > 0 => mask(u, depth - 1)?.or(mask(u, depth - 1)?),
        _ => Mask::custom(expression(u, Wanted::Bool, 5)?),
    })
}

fn dtype(u: &mut Unstructured<'_>) -> Result<DType> {
    u.choose(&[DType::F32, DType::F32, DType::F16, DType::Bf16, DType::I32]).copied()
}

fn offsets(u: &mut Unstructured<'_>) -> Result<Vec<i32>> {
    let mut at = 0i32;
    let mut all = vec![if u.ratio(1, 16)? { u.arbitrary()? } else { 0 }];
    for _ in 0..u.int_in_range(0..=4usize)? {
        let step = if u.ratio(1, 16)? { u.arbitrary::<i32>()? } else { u.int_in_range(0..=6)? };
        at = at.wrapping_add(step);
        all.push(at);
    }
    Ok(all)
}

/// Offsets of packed sequences, where the problem is packed.
pub type Offsets = Option<(Vec<i32>, Vec<i32>)>;

/// A described problem, not yet built.
pub fn builder(u: &mut Unstructured<'_>) -> Result<(ProblemBuilder, Offsets)> {
    let mut cu_seqlens = None;
    let mut b = match u.int_in_range(0..=7u8)? {
        0 => {
            let [batch, total_q, total_k] = [size(u)?, size(u)?, size(u)?];
            let [max_q, max_k] = [size(u)?, size(u)?];
            Problem::builder().packed_sizes(Packed { batch, total_q, total_k, max_q, max_k })
        }
        1 | 2 => {
            let (q, k) = (offsets(u)?, offsets(u)?);
            let b = Problem::builder().packed(&q, &k);
            cu_seqlens = Some((q, k));
            b
        }
        _ => Problem::builder().dense(size(u)?, size(u)?, size(u)?),
    };
    b = if u.ratio(1, 8)? {
        b.heads(size(u)?, size(u)?)
    } else {
        let kv = u.int_in_range(1..=3usize)?;
        b.heads(kv * u.int_in_range(1..=3usize)?, kv)
    };
    b = if u.ratio(1, 8)? { b.head_dims(size(u)?, size(u)?) } else { b.head_dim(u.int_in_range(1..=9usize)?) };
    for name in NAMES {
        if u.ratio(1, 2)? {
            let shape = (0..u.int_in_range(0..=3usize)?).map(|_| size(u)).collect::<Result<Vec<_>>>()?;
            let dtype = dtype(u)?;
            b = if u.arbitrary()? { b.aux(name, dtype, &shape) } else { b.aux_with_grad(name, dtype, &shape) };
        }
    }
    for _ in 0..u.int_in_range(0..=5usize)? {
        b = match u.int_in_range(0..=11u8)? {
            0 => b.dtype(dtype(u)?),
            1 => b.scale(float(u)?),
            2 | 3 => b.mask(mask(u, 2)?),
            4 => b.softcap(float(u)?),
            5 => b.alibi(),
            6 => b.bias([size(u)?, size(u)?, size(u)?, size(u)?], dtype(u)?, u.arbitrary()?),
            7 | 8 => b.score_mod(expression(u, Wanted::Float, 6)?),
            9 => b.sinks().used_lengths(u.arbitrary()?, u.arbitrary()?),
            10 => b.block_mask(BlockSpec {
                rows: size(u)?,
                cols: size(u)?,
                batch: u.int_in_range(0..=2)?,
                heads: u.int_in_range(0..=2)?,
            }),
            _ => b.exp(match u.int_in_range(0..=3u8)? {
                0 => Exp::Native,
                1 => Exp::Poly { degree: u.int_in_range(2..=6)?, share: float(u)? },
                2 => Exp::Sas { threshold: float(u)? },
                _ => Exp::SasOnline,
            }),
        };
    }
    Ok((b, cu_seqlens))
}

/// More elements than this are not made.
const MOST: usize = 4096;

/// A tensor of the given shape, with a few values repeated; now and then of another shape or type.
pub fn tensor(u: &mut Unstructured<'_>, dtype: DType, shape: &[usize]) -> Result<Option<Tensor>> {
    let dtype = if u.ratio(1, 32)? { crate::dtype(u)? } else { dtype };
    let mut shape = shape.to_vec();
    if u.ratio(1, 32)? {
        shape.push(size(u)?);
    }
    let count = shape.iter().try_fold(1usize, |n, &m| n.checked_mul(m));
    let Some(count) = count.filter(|&n| n <= MOST) else { return Ok(None) };
    let pattern = (0..u.int_in_range(1..=7usize)?).map(|_| float(u)).collect::<Result<Vec<_>>>()?;
    let value = |i: usize| pattern[i % pattern.len()];
    Ok(match dtype {
        DType::F32 => Tensor::new((0..count).map(value).collect(), &shape),
        DType::F16 => Tensor::new((0..count).map(|i| f16::from_f32(value(i))).collect(), &shape),
        DType::Bf16 => Tensor::new((0..count).map(|i| bf16::from_f32(value(i))).collect(), &shape),
        _ => {
            let pattern = (0..u.int_in_range(1..=7usize)?).map(|_| int(u)).collect::<Result<Vec<_>>>()?;
            Tensor::new((0..count).map(|i| pattern[i % pattern.len()]).collect(), &shape)
        }
    }
    .ok())
}

/// The same tensor, sometimes with the strides of a broadcast or of a sparser buffer.
pub fn view<'a>(u: &mut Unstructured<'_>, tensor: &'a Tensor) -> Result<TensorView<'a>> {
    let plain = tensor.view();
    if u.ratio(7, 8)? {
        return Ok(plain);
    }
    let strides = (0..plain.shape().len()).map(|_| size(u)).collect::<Result<Vec<_>>>()?;
    let strided = tensor.as_slice::<f32>().and_then(|data| TensorView::strided(data, plain.shape(), &strides).ok());
    Ok(strided.unwrap_or(plain))
}

/// Lists of blocks for a problem that wants them; not always good ones.
pub fn block_mask(u: &mut Unstructured<'_>, problem: &Problem) -> Result<Option<BlockMask>> {
    let Some(spec) = problem.blocks() else { return Ok(None) };
    let [q_blocks, k_blocks] = spec.blocks(problem.max_q_len(), problem.max_k_len());
    let rows = [spec.batch, spec.heads, q_blocks].iter().try_fold(1usize, |n, &m| n.checked_mul(m));
    let Some(rows) = rows.filter(|&rows| rows <= 64) else { return Ok(None) };
    let (mut partial, mut full) = (Vec::new(), Vec::new());
    for _ in 0..rows {
        let (mut p, mut f) = (Vec::new(), Vec::new());
        for block in 0..k_blocks.min(16) {
            match u.int_in_range(0..=31u8)? {
                0 => p.push(u.arbitrary()?),
                1..=10 => p.push(block as i32),
                11..=20 => f.push(block as i32),
                _ => {}
            }
        }
        partial.push(p);
        full.push(f);
    }
    Ok(BlockMask::new(spec, [q_blocks, k_blocks], partial, full).ok())
}

/// What engines rely on: indices of loads stay inside their tensors, and the blocks of a mask never claim too much.
pub fn check_promises(bound: &Bound<'_>, spec: BlockSpec) {
    let problem = bound.problem();
    let blocks = BlockMask::from_mask(bound, spec).ok();
    for s in bound.sequences() {
        for head in 0..problem.q_heads() {
            for (q, k) in (0..s.q_len).flat_map(|q| (0..s.k_len).map(move |k| (q, k))) {
                let (q_len, k_len, aux) = (s.q_len, s.k_len, bound.aux());
                let env = Env { score: 0.5, batch: s.batch, head, q, k, q_len, k_len, aux };
                for gradient in problem.aux_gradients() {
                    for (at, &size) in gradient.at.iter().zip(&problem.aux()[gradient.aux].shape) {
                        let index = at.eval(&env).int();
                        assert!((0..size as i64).contains(&index), "index {index} of {size}");
                    }
                }
                if let Some(blocks) = &blocks {
                    let visible = problem.mask_program().is_none_or(|mask| mask.eval(&env).bool());
                    match blocks.coverage(s.batch, head, q, k) {
                        Coverage::Full => {
                            assert!(visible, "hidden in a full block: q {q}, k {k}, {:?}", problem.mask())
                        }
                        Coverage::Empty => {
                            assert!(!visible, "visible in an empty block: q {q}, k {k}, {:?}", problem.mask())
                        }
                        Coverage::Partial => {}
                    }
                }
            }
        }
    }
}
