//! Finds out how a device's tensor cores add: one product of 16 terms, on inputs that distinguish models of the adder.

use crate::sim::SimError;
use fulgurite_core::random::Rng;
use fulgurite_kernels::probe::{self, SIZE, TERMS};
use fulgurite_ptx::device::{Device, Stream, TensorSpan, Value};
use fulgurite_ptx::model::{Adder, Exponent, Rounding, decode};
use fulgurite_ptx::{Number, bf16, f16};
use std::sync::Arc;

/// Number of products that the device computes, each with a different kind of input.
const BLOCKS: u32 = 8;

/// A model of the adder, and how well it explains a device's results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fit {
    /// Parameters of the model.
    pub adder: Adder,
    /// Number of computed sums.
    pub elements: u64,
    /// Number of sums for which the model gives different bits.
    pub unequal: u64,
}

/// All models to try.
fn candidates() -> Vec<Adder> {
    let mut all = Vec::new();
    for (kept_bits, group) in (23..=27).flat_map(|bits| [16, 8, 4].map(|group| (bits, group))) {
        for rounding in [Rounding::Cut, Rounding::Nearest] {
            let adder = Adder { kept_bits, group, exponent: Exponent::Factors, result_bits: 23, rounding, fused: true };
            all.extend([adder, Adder { exponent: Exponent::Product, ..adder }, Adder { fused: false, ..adder }]);
        }
    }
    all
}

/// Runs a product on a device and every model on the same inputs. Returns the best model first.
///
/// ```
/// use fulgurite::sim::{Adder, Number, Options, Sim, fit_adders};
///
/// // The simulator adds as Hopper does, and the inputs leave no other model standing.
/// let fits = fit_adders(&Sim::new(Options::default()), Number::F16, 1)?;
/// assert_eq!((fits[0].adder, fits[0].unequal), (Adder::hopper(Number::F16), 0));
/// assert!(fits[1..].iter().all(|fit| fit.unequal > 0));
/// # Ok::<(), fulgurite::sim::SimError>(())
/// ```
pub fn fit_adders(device: &dyn Device, number: Number, seed: u64) -> Result<Vec<Fit>, SimError> {
    let kernel = match number {
        Number::F16 => probe::kernel::<f16>(device.target())?,
        _ => probe::kernel::<bf16>(device.target())?,
    };
    let inputs = Inputs::new(number, seed);
    let bytes = |words: &[u16]| -> Vec<u8> { words.iter().flat_map(|x| x.to_le_bytes()).collect() };
    let upload = |bytes: Vec<u8>| {
        let buffer = device.allocate(bytes.len() as u64)?;
        device.upload(buffer.span(), &bytes).map(|()| buffer)
    };
    let (a, b) = (upload(bytes(&inputs.a))?, upload(bytes(&inputs.b))?);
    let c = upload(inputs.c.iter().flat_map(|x| x.to_le_bytes()).collect())?;
    let d = device.allocate(c.span().bytes())?;
    let [terms, rows] = [TERMS, BLOCKS * SIZE].map(u64::from);
    let tensor = |span| TensorSpan { span, number, extent: vec![terms, rows], strides: vec![2 * terms], ragged: None };
    let args = [
        Value::Tensor(tensor(a.span())),
        Value::Tensor(tensor(b.span())),
        Value::Pointer(c.span()),
        Value::Pointer(d.span()),
    ];
    let module = device.load(Arc::new(kernel))?;
    device.launch(&module, [BLOCKS, 1, 1], &args, Stream::default())?;
    device.synchronize(Stream::default())?;
    let mut got = vec![0; d.span().bytes() as usize];
    device.download(d.span(), &mut got)?;
    let got: Vec<u32> = got.chunks_exact(4).map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();

    let fit = |adder: Adder| {
        let unequal = (0..got.len()).filter(|&i| inputs.sum(&adder, i) != got[i]).count() as u64;
        Fit { adder, elements: got.len() as u64, unequal }
    };
    let mut fits: Vec<Fit> = candidates().into_iter().map(fit).collect();
    fits.sort_by_key(|fit| fit.unequal);
    Ok(fits)
}

/// Factors (as bits) and accumulators.
struct Inputs {
    number: Number,
    a: Vec<u16>,
    b: Vec<u16>,
    c: Vec<u32>,
}

impl Inputs {
    /// Blocks differ in the spread of exponents. In some, the second half of the products cancels the first except for
    /// one term, so that only the truncation error remains. Some factors are zero, and some are subnormal.
    fn new(number: Number, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let (fraction_bits, bias) = if number == Number::F16 { (10, 15) } else { (7, 127) };
        let mut inputs = Inputs { number, a: Vec::new(), b: Vec::new(), c: Vec::new() };
        for block in 0..BLOCKS {
            let spread = [1, 4, 12, 26][block as usize / 2];
            let cancels = block % 2 == 1;
            let draw = |rng: &mut Rng| {
                let bits = rng.bits();
                let exponent = match bits >> 58 {
                    0 => return 0,
                    1 => 0, // subnormal
                    _ => bias + (bits >> 32) % spread - spread / 2,
                };
                (bits & ((1 << fraction_bits) - 1) | exponent << fraction_bits | bits >> 40 & 0x8000) as u16
            };
            for side in [&mut inputs.a, &mut inputs.b] {
                side.extend((0..SIZE * TERMS).map(|_| draw(&mut rng)));
            }
            let half = TERMS as usize / 2;
            for row in (block * SIZE..(block + 1) * SIZE).filter(|_| cancels) {
                let first = (row * TERMS) as usize;
                for i in first..first + half - 1 {
                    inputs.a[i + half] = inputs.a[i] ^ 0x8000;
                    inputs.b[i + half] = inputs.b[i];
                }
            }
            inputs.c.extend((0..SIZE * SIZE).map(|_| {
                let bits = rng.bits();
                let exponent = 127 + (bits >> 32) % (2 * spread) - spread;
                if cancels || bits >> 62 == 0 { 0 } else { bits as u32 & 0x807f_ffff | (exponent as u32) << 23 }
            }));
        }
        inputs
    }

    /// The `i`-th sum according to a model.
    fn sum(&self, adder: &Adder, i: usize) -> u32 {
        let (size, terms) = (SIZE as usize, TERMS as usize);
        let (row, col) = (i / size * terms, (i / size / size * size + i % size) * terms);
        let value = |bits: u16| decode(bits.into(), self.number);
        let factors: Vec<[f64; 2]> = (0..terms).map(|t| [value(self.a[row + t]), value(self.b[col + t])]).collect();
        adder.add(self.c[i], &factors, Number::F32, [self.number; 2])
    }
}
