//! The table of services in the module's header is what the kernels' code does.

use crate::attention::backward::d_q::service::{SignalTable, Signals};
use crate::attention::backward::plan::BackwardPlan;
use crate::attention::backward::state::Call;
use crate::attention::backward::{BackwardConfig, Features, KernelShape, Order, main};
use crate::params::Program;
use fulgurite_core::{DType, Mask, cases};
use fulgurite_ptx::{Target, bf16};

/// The events that the main kernel of these features waits for and signals.
fn rows(features: &Features, shape: &KernelShape) -> SignalTable {
    let mut rows = SignalTable::new();
    let program = Program::<Call>::build("attention_backward", Target::HOPPER, |p| {
        rows = main::build::<bf16>(p, features, shape).rows();
    });
    program.expect("a kernel of the test is not built");
    rows
}

/// The events that kernels with every service wait for and signal.
fn all_rows() -> SignalTable {
    let features = |dim, order| Features { order, ..Features::plain([dim, dim], Mask::none()) };
    let mut all = SignalTable::new();
    let mut add = |features: &Features, shape: &KernelShape| {
        for (key, Signals { waits, signals }) in rows(features, shape) {
            let row = all.entry(key).or_default();
            row.waits.extend(waits);
            row.signals.extend(signals);
        }
    };
    for order in [Order::Any, Order::Fixed] {
        for dim in [128, 192, 256] {
            let features = features(dim, order);
            add(&features, &KernelShape::plain(&features, BackwardConfig::hopper(dim)));
        }
        let features = features(128, order);
        add(&features, &KernelShape::plain(&features, BackwardConfig::hopper(128).of_threads(128)));
        let config = BackwardConfig { key_depth: 1, ..BackwardConfig::hopper(128) };
        let rounds = KernelShape { rounds: true, ..KernelShape::plain(&features, config) };
        add(&features, &rounds);
        if order == Order::Any {
            add(&features, &KernelShape { splits: true, ..rounds });
        }
    }
    let fixed = |case: &cases::Case| BackwardPlan::new(case.problem(), false, Order::Fixed).ok();
    let exact = cases::cases(DType::Bf16).iter().filter_map(fixed).find(|plan| plan.has_exact_sums());
    let exact = exact.expect("no case has exact sums");
    add(exact.features(), exact.shape());
    all
}

/// The table as text, as it stands in the header.
fn table(rows: &SignalTable) -> Vec<String> {
    let list = |events: &std::collections::BTreeSet<&str>| events.iter().copied().collect::<Vec<_>>().join(", ");
    let line = |((service, actor), row): (&(&str, _), &Signals)| {
        let (actor, waits, signals): (&super::service::Actor, _, _) = (actor, list(&row.waits), list(&row.signals));
        format!("//! | {service} | {actor} | {waits} | {signals} |")
    };
    rows.iter().map(line).collect()
}

#[test]
fn the_table_of_services_is_what_the_code_does() {
    let header = include_str!("mod.rs").lines();
    let kept: Vec<&str> = header.skip_while(|line| !line.starts_with("//! |---")).skip(1).collect();
    let kept: Vec<&str> = kept.into_iter().take_while(|line| line.starts_with("//! |")).collect();
    let now = table(&all_rows());
    assert!(kept == now, "the table in the header of d_q must be:\n{}", now.join("\n"));
}

/// Every event between threads of a CTA, or between CTAs, is signalled by one thread and waited for by another.
#[test]
fn every_event_is_signalled_and_waited_for() {
    let rows = all_rows();
    let of = |pick: fn(&Signals) -> &std::collections::BTreeSet<&'static str>| {
        let event = |((service, _), row): (&(&'static str, _), &Signals)| {
            pick(row).iter().map(|event| (*service, *event)).collect::<Vec<_>>()
        };
        rows.iter().flat_map(event).collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(of(|row| &row.waits), of(|row| &row.signals));
}
