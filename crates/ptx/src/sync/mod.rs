//! Synchronisation between warps: rings filled by TMA, mailboxes, token rings, channels between the CTAs of
//! a cluster, and queues of bulk reductions. No code outside this module handles phase bits.

mod accumulator_channel;
mod bulk_reducer;
mod claims;
mod cluster;
mod copy_ring;
pub(crate) mod cta_pair;
mod double_tile;
mod gate;
pub(crate) mod pipe;
mod stage;
mod staged_sums;
mod tensor_ring;
mod token_ring;
mod zeros;

pub use accumulator_channel::AccumulatorChannel;
pub use bulk_reducer::BulkReducer;
pub use claims::Claims;
pub use cluster::{ClusterBroadcast, PeerTiles};
pub use copy_ring::{CopyRing, GlobalRows};
pub use cta_pair::CtaPair;
pub use double_tile::DoubleTile;
pub use gate::Gate;
pub use pipe::{Filling, Mailbox, Numbers, Pipe};
pub use staged_sums::StagedSums;
pub use tensor_ring::{TensorRing, Which};
pub use token_ring::TokenRing;
pub use zeros::Zeros;
