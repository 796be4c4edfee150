//! Attention in candle: an operator with gradients over tensors of `candle-core` in host memory.

use crate::attention::{Attention, attention as call_of};
use crate::{Error, Saved};
use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Shape, Storage, Tensor};
use fulgurite_core::{Tensor as Owned, TensorView};
use std::sync::{Mutex, PoisonError};

/// Attention of candle tensors `[batch, sequence, heads, head_dim]` on the CPU, with gradients by candle's `backward`.
/// `describe` adds masks, modifiers and settings to the call; it runs once in forward and once in backward.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let q = Var::randn(0f32, 1., (1, 10, 4, 16), &Device::Cpu)?;
/// let k = Tensor::randn(0f32, 1., (1, 10, 2, 16), &Device::Cpu)?; // two query heads share a head
/// let o = fulgurite::candle::attention(&q, &k, &k, |call| call.causal().softcap(30.0))?;
/// let gradients = o.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&q).unwrap().dims(), q.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// Tensors may have any strides with a contiguous last axis: a transposed tensor is read in place. Second derivatives do
/// not exist: the gradients are constants to candle.
///
/// # Errors
///
/// Whatever [`Attention::forward`](crate::Attention::forward) refuses, tensors on a GPU, and types other than f32, f16
/// and bf16.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    describe: impl for<'a> Fn(Attention<'a>) -> Attention<'a> + Send + Sync + 'static,
) -> candle_core::Result<Tensor> {
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        on_host(name, tensor.device())?;
    }
    q.apply_op3(k, v, Op { describe, lse: Mutex::new(None) })
}

/// One call. It keeps the LSE for its gradients.
struct Op<F> {
    describe: F,
    lse: Mutex<Option<Owned>>,
}

impl<F: for<'a> Fn(Attention<'a>) -> Attention<'a> + Send + Sync> CustomOp3 for Op<F> {
    fn name(&self) -> &'static str {
        "fulgurite attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let views = [view("q", q, q_layout)?, view("k", k, k_layout)?, view("v", v, v_layout)?];
        let [q, k, v] = &views;
        let forward = (self.describe)(call_of(q, k, v)).forward().map_err(candle_core::Error::wrap)?;
        let shape = Shape::from(forward.o.shape().to_vec());
        *self.lse.lock().unwrap_or_else(PoisonError::into_inner) = Some(forward.lse);
        Ok((storage(&forward.o), shape))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        d_o: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let lse = self.lse.lock().unwrap_or_else(PoisonError::into_inner);
        let lse = lse.as_ref().expect("bug in fulgurite: gradients without forward");
        // The gradient of a sum is one number with strides of 0.
        let d_o = d_o.contiguous()?;
        let tensors = [("q", q), ("k", k), ("v", v), ("o", o), ("d_o", &d_o)];
        let held = tensors.map(|(name, tensor)| (name, tensor.storage_and_layout()));
        let views = held.iter().map(|(name, (storage, layout))| match &**storage {
            Storage::Cpu(storage) => view(name, storage, layout),
            _ => Err(refuse(name, "not in host memory")),
        });
        let views = views.collect::<candle_core::Result<Vec<_>>>()?;
        let saved = Saved { o: views[3], lse: lse.view(), d_o: views[4], d_lse: None };
        let call = (self.describe)(call_of(&views[0], &views[1], &views[2]));
        let gradients = call.backward(&saved).map_err(candle_core::Error::wrap)?;
        let [d_q, d_k, d_v] = [gradients.d_q, gradients.d_k, gradients.d_v].map(|d| tensor(&d).map(Some));
        Ok((d_q?, d_k?, d_v?))
    }
}

/// A candle tensor in host memory as a view.
fn view<'a>(name: &str, storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<TensorView<'a>> {
    let (from, shape, strides) = (layout.start_offset(), layout.dims(), layout.stride());
    let view = match storage {
        CpuStorage::F32(data) => TensorView::strided(&data[from..], shape, strides),
        CpuStorage::F16(data) => TensorView::strided(&data[from..], shape, strides),
        CpuStorage::BF16(data) => TensorView::strided(&data[from..], shape, strides),
        _ => return Err(refuse(name, "of another type")),
    };
    view.map_err(|e| candle_core::Error::wrap(Error::from(e)))
}

/// The elements of a tensor as candle stores them.
fn storage(tensor: &Owned) -> CpuStorage {
    if let Some(data) = tensor.as_slice::<f32>() {
        CpuStorage::F32(data.to_vec())
    } else if let Some(data) = tensor.as_slice::<crate::f16>() {
        CpuStorage::F16(data.to_vec())
    } else {
        let data = tensor.as_slice::<crate::bf16>();
        CpuStorage::BF16(data.expect("bug in fulgurite: results are f32, f16 or bf16").to_vec())
    }
}

/// A tensor as a candle tensor without a history.
fn tensor(tensor: &Owned) -> candle_core::Result<Tensor> {
    let shape = &tensor.shape()[..];
    match storage(tensor) {
        CpuStorage::F32(data) => Tensor::from_vec(data, shape, &Device::Cpu),
        CpuStorage::F16(data) => Tensor::from_vec(data, shape, &Device::Cpu),
        CpuStorage::BF16(data) => Tensor::from_vec(data, shape, &Device::Cpu),
        _ => unreachable!("bug in fulgurite: `storage` makes no other type"),
    }
}

fn on_host(name: &str, device: &Device) -> candle_core::Result<()> {
    if device.is_cpu() { Ok(()) } else { Err(refuse(name, "not in host memory")) }
}

fn refuse(name: &str, fault: &str) -> candle_core::Error {
    let types = [DType::F32, DType::F16, DType::BF16].map(|dtype| dtype.as_str()).join(", ");
    candle_core::Error::Msg(format!(
        "`{name}` is {fault}, allowed: {types} on the CPU; convert it with `to_dtype`, `to_device`"
    ))
    .bt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Var;
    use fulgurite_core::Mask;

    /// Softmax attention in candle's own operators, causal from the bottom right.
    fn plain(q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let (heads, kv_heads) = (q.dim(2)?, k.dim(2)?);
        let spread = |x: &Tensor| -> candle_core::Result<Tensor> {
            let (batch, length, _, dim) = x.dims4()?;
            let x = x.unsqueeze(3)?.expand((batch, length, kv_heads, heads / kv_heads, dim))?;
            x.reshape((batch, length, heads, dim))?.transpose(1, 2)?.contiguous()
        };
        let (q, k, v) = (q.transpose(1, 2)?.contiguous()?, spread(k)?, spread(v)?);
        let (q_len, k_len, dim) = (q.dim(2)?, k.dim(2)?, q.dim(3)?);
        let hidden: Vec<f32> = (0..q_len * k_len)
            .map(|at| if at % k_len + q_len > at / k_len + k_len { f32::NEG_INFINITY } else { 0.0 })
            .collect();
        let hidden = Tensor::from_vec(hidden, (1, 1, q_len, k_len), &Device::Cpu)?;
        let scores = (q.matmul(&k.t()?)? / (dim as f64).sqrt())?.broadcast_add(&hidden)?;
        let weights = (scores.broadcast_sub(&scores.max_keepdim(3)?.detach())?).exp()?;
        weights.broadcast_div(&weights.sum_keepdim(3)?)?.matmul(&v)?.transpose(1, 2)
    }

    #[test]
    fn results_and_gradients_are_those_of_candles_operators() -> candle_core::Result<()> {
        let cpu = &Device::Cpu;
        for ([heads, kv_heads], [q_len, k_len], dim) in
            [([4, 2], [7, 7], 16), ([3, 1], [5, 33], 8), ([2, 2], [17, 20], 40)]
        {
            let var = |length: usize, heads: usize| Var::randn(0f32, 1., (2, length, heads, dim), cpu);
            let (q, k, v) = (var(q_len, heads)?, var(k_len, kv_heads)?, var(k_len, kv_heads)?);
            let d_o = Tensor::randn(0f32, 1., (2, q_len, heads, dim), cpu)?;
            let ours = attention(&q, &k, &v, |call| call.causal())?;
            let theirs = plain(&q, &k, &v)?;
            let gradients = [&ours, &theirs].map(|o| (o * &d_o).and_then(|o| o.sum_all()?.backward()));
            let [ours_back, theirs_back] = gradients;
            let (ours_back, theirs_back) = (ours_back?, theirs_back?);
            let differ = |a: &Tensor, b: &Tensor| -> candle_core::Result<f32> {
                (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar()
            };
            assert!(differ(&ours, &theirs)? <= 1e-5);
            for x in [&q, &k, &v] {
                let (a, b) = (ours_back.get(x).unwrap(), theirs_back.get(x).unwrap());
                assert!(differ(a, b)? <= 1e-4, "{:?}", x.dims());
            }
        }
        Ok(())
    }

    #[test]
    fn transposed_tensors_and_other_types_are_read_in_place() -> candle_core::Result<()> {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // [batch, heads, sequence, dim], as candle's models have it.
            let x = Tensor::randn(0f32, 1., (2, 4, 9, 16), &Device::Cpu)?.to_dtype(dtype)?;
            let turned = x.transpose(1, 2)?;
            let o = attention(&turned, &turned, &turned, |call| call.mask(Mask::window(Some(3), Some(0))))?;
            let copy = turned.contiguous()?;
            let same = attention(&copy, &copy, &copy, |call| call.mask(Mask::window(Some(3), Some(0))))?;
            let bits = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
            assert_eq!((o.dims(), o.dtype(), bits(&o)?), (same.dims(), dtype, bits(&same)?));
        }
        Ok(())
    }

    #[test]
    fn wrong_calls_are_refused() -> candle_core::Result<()> {
        let x = Tensor::zeros((1, 4, 2, 8), DType::F64, &Device::Cpu)?;
        let refused = |q: &Tensor, k: &Tensor| attention(q, k, k, |call| call.causal()).unwrap_err().to_string();
        let said = refused(&x, &x);
        assert!(said.contains("`q` is of another type, allowed: f32, f16, bf16 on the CPU"), "{said}");
        let (q, k) = (x.to_dtype(DType::F32)?, Tensor::zeros((1, 4, 3, 8), DType::F32, &Device::Cpu)?);
        let said = refused(&q, &k);
        assert!(said.contains("`heads`: 2 query heads over 3 key/value heads"), "{said}");
        let said = refused(&q.i_flat()?, &k);
        assert!(said.contains("[batch, sequence, heads, head_dim]"), "{said}");
        Ok(())
    }

    /// A tensor without its axes.
    trait Flat {
        fn i_flat(&self) -> candle_core::Result<Tensor>;
    }

    impl Flat for Tensor {
        fn i_flat(&self) -> candle_core::Result<Tensor> {
            self.flatten_all()
        }
    }
}
