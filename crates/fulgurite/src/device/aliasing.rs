//! What a call writes must share no memory with anything else that the call reads or writes.

use fulgurite_core::{Footprint, GradientOutputs, InputError, Inputs, Saved, TensorView, TensorViewMut};

/// A named tensor in device memory.
type Named<'a> = (&'a str, Footprint);

fn named<'a>(name: &'a str, view: &TensorView<'_>) -> Option<Named<'a>> {
    view.footprint().map(|footprint| (name, footprint))
}

/// The tensors that a call reads.
fn read<'a>(inputs: &'a Inputs<'_>) -> impl Iterator<Item = Named<'a>> {
    let rows = [("q", Some(&inputs.q)), ("k", Some(&inputs.k)), ("v", Some(&inputs.v))];
    let others = [
        ("sinks", inputs.sinks.as_ref()),
        ("cu_seqlens_q", inputs.cu_seqlens_q.as_ref()),
        ("cu_seqlens_k", inputs.cu_seqlens_k.as_ref()),
        ("used_q", inputs.used_q.as_ref()),
        ("used_k", inputs.used_k.as_ref()),
    ];
    let aux = inputs.aux.iter().map(|(name, view)| (&**name, Some(view)));
    let lists = inputs.block_lists.iter().flat_map(|lists| lists.counts.iter().chain(&lists.blocks));
    let lists = lists.map(|view| ("the block lists", Some(view)));
    rows.into_iter().chain(others).chain(aux).chain(lists).filter_map(|(name, view)| named(name, view?))
}

/// Refuses a tensor that is written and shares memory with one that is read, or with another one that is written.
fn alone<'a>(written: &[Option<Named<'a>>], read: impl Iterator<Item = Named<'a>>) -> Result<(), InputError> {
    let shared = |arg: &str, other: &str| Err(InputError::Shared { arg: arg.into(), other: other.into() });
    let written = || written.iter().flatten();
    for (other, memory) in read {
        if let Some((arg, _)) = written().find(|(_, own)| own.overlaps(&memory)) {
            return shared(arg, other);
        }
    }
    for (i, (other, memory)) in written().enumerate() {
        if let Some((arg, _)) = written().skip(i + 1).find(|(_, own)| own.overlaps(memory)) {
            return shared(arg, other);
        }
    }
    Ok(())
}

/// Refuses an o or LSE that shares memory with another tensor of the call.
pub(super) fn check_forward(
    inputs: &Inputs<'_>,
    o: &TensorViewMut<'_>,
    lse: Option<&TensorView<'_>>,
) -> Result<(), InputError> {
    alone(&[named("out", &o.as_view()), lse.and_then(|lse| named("lse", lse))], read(inputs))
}

/// Refuses gradients that share memory with another tensor of the call.
pub(super) fn check_backward(
    inputs: &Inputs<'_>,
    saved: &Saved<'_>,
    gradients: &GradientOutputs<'_>,
) -> Result<(), InputError> {
    let GradientOutputs { d_q, d_k, d_v, d_sinks, d_aux } = gradients;
    let optional = |name, view: &Option<TensorViewMut<'_>>| named(name, &view.as_ref()?.as_view());
    let rows = [("d_q", d_q), ("d_k", d_k), ("d_v", d_v)].map(|(name, view)| named(name, &view.as_view()));
    let mut written = rows.to_vec();
    written.push(optional("d_sinks", d_sinks));
    written.extend(d_aux.iter().map(|view| optional("a gradient of an auxiliary tensor", view)));
    let of_forward = [("o", Some(&saved.o)), ("lse", Some(&saved.lse)), ("d_o", Some(&saved.d_o))];
    let of_forward = of_forward.into_iter().chain([("d_lse", saved.d_lse.as_ref())]);
    alone(&written, read(inputs).chain(of_forward.filter_map(|(name, view)| named(name, view?))))
}
