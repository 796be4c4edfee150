//! The call types from which the forward and the decode kernel take their launch arguments.

use crate::params::given;
use crate::parts::arguments::DeviceTensor;
use crate::parts::block_lists::ListArgs;
use crate::parts::merge::ResultArgs;
use crate::parts::modifier::AuxArgs;
use crate::parts::nonfinite::PlainArgs;
use crate::parts::schedule::{BandArgs, SequenceArgs};
use crate::parts::sequences::DenseArgs;
use fulgurite_ptx::Number;
use fulgurite_ptx::device::{Span, TensorSpan};

/// Arguments that the forward and the decode kernel share. Parts that a problem lacks are `None`.
pub(crate) struct CommonArgs {
    pub counters: Span,
    /// Query heads per head of k and v.
    pub group: u64,
    /// Factor of the raw scores.
    pub scale: f32,
    pub dense: Option<DenseArgs>,
    pub ragged: Option<SequenceArgs>,
    pub aux: Vec<AuxArgs>,
    pub plain: Option<PlainArgs>,
}

impl CommonArgs {
    /// Lengths of equal sequences.
    pub fn dense(&self) -> &DenseArgs {
        given(&self.dense)
    }

    /// Lengths of ragged sequences.
    pub fn ragged(&self) -> &SequenceArgs {
        given(&self.ragged)
    }

    /// Rows that the non-finite path reads.
    pub fn plain(&self) -> &PlainArgs {
        given(&self.plain)
    }
}

/// Arguments of the forward kernel.
pub(crate) struct ForwardCall {
    pub q: RowTensor,
    pub k: RowTensor,
    pub v: RowTensor,
    pub o: RowTensor,
    pub common: CommonArgs,
    pub results: ResultArgs,
    /// Query heads.
    pub heads: u64,
    pub bands: Option<BandArgs>,
    pub lists: Option<ListArgs>,
}

impl ForwardCall {
    /// The order of tiles of equal sequences.
    pub fn bands(&self) -> &BandArgs {
        given(&self.bands)
    }

    /// The lists of a block mask.
    pub fn lists(&self) -> &ListArgs {
        given(&self.lists)
    }
}

/// A tensor of rows for TMA.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowTensor {
    pub tensor: DeviceTensor,
    pub number: Number,
    /// Whether the rows of all sequences form one axis. Sequences must then start at whole rows.
    pub ragged: bool,
}

impl RowTensor {
    pub fn span(&self) -> TensorSpan {
        match self.ragged {
            true => self.tensor.ragged(self.number).expect("bug in fulgurite: sequences between rows were refused"),
            false => self.tensor.tensor(self.number),
        }
    }
}

/// The tensors of rows for TMA.
pub(crate) struct RowTensors {
    pub q: RowTensor,
    pub k: RowTensor,
    pub v: RowTensor,
    pub o: RowTensor,
}

/// A forward launch before its arguments are laid out.
pub(crate) struct ForwardLaunch {
    pub grid: [u32; 3],
    pub call: ForwardCall,
}
