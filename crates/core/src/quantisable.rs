//! The check that tensors can be quantised.

use crate::error::InputError;
use crate::inputs::Bound;
use crate::precision::Precision;
use crate::problem::Side;
use crate::tensor::Data;

impl Bound<'_> {
    /// Checks that all elements in use of quantised tensors are finite: there is no scale for others.
    pub(crate) fn quantisable(&self) -> Result<(), InputError> {
        let problem = self.problem();
        if problem.precision() == Precision::Native {
            return Ok(());
        }
        let tensors = [
            ("q", self.q(), Side::Query, problem.q_heads(), problem.head_dim()),
            ("k", self.k(), Side::Key, problem.kv_heads(), problem.head_dim()),
            ("v", self.v(), Side::Key, problem.kv_heads(), problem.value_dim()),
        ];
        for (arg, view, side, heads, dim) in tensors {
            for sequence in self.sequences() {
                let rows = self.row_layout(view.strides(), sequence, side);
                let len = if side == Side::Query { sequence.q_len } else { sequence.k_len };
                for at in (0..len).flat_map(|i| (0..heads).map(move |h| rows.at(i, h))) {
                    // Check the exponent bits without stopping early, so that the loop vectorises.
                    let fine = match view.data() {
                        Data::F32(x) => x[at..at + dim].iter().fold(true, |fine, x| fine & x.is_finite()),
                        Data::F16(x) => x[at..at + dim].iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff)) < 0x7c00,
                        Data::Bf16(x) => x[at..at + dim].iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff)) < 0x7f80,
                        _ => true,
                    };
                    if let Some(i) = (0..if fine { 0 } else { dim }).find(|i| !view.at(at + i).is_finite()) {
                        let (value, precision) = (view.at(at + i), problem.precision().to_string());
                        return Err(InputError::NotFinite { arg, at: at + i, value, precision });
                    }
                }
            }
        }
        Ok(())
    }
}
