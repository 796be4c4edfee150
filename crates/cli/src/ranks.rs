//! `explain --ranks`: a prediction of attention on several GPUs.

use crate::args::ExplainArgs;
use crate::{Failure, json, say};
use fulgurite::gpu::{RankBytes, RankProblem, RankTimes, StepSeconds, Tables, Target, explain_ranks};
use serde::Serialize;

#[derive(Serialize)]
struct Results {
    version: &'static str,
    pass: &'static str,
    problem: String,
    ranks: usize,
    /// Whether times of steps were given; otherwise kernels run at their bounds.
    measured_steps: bool,
    link_gigabytes_per_second: f64,
    link_latency_us: f64,
    /// On one GPU.
    one_us: f64,
    ring: Strategy,
    /// The prediction, or why heads cannot be exchanged.
    ulysses: Result<Strategy, String>,
}

#[derive(Serialize)]
struct Strategy {
    /// From start to end.
    us: f64,
    kernel_us: f64,
    /// Messages, if nothing overlapped.
    message_us: f64,
    /// Waiting for messages.
    exposed_us: f64,
    /// Time on one GPU over ranks times this time.
    efficiency: f64,
    bytes_sent: Bytes,
}

#[derive(Serialize)]
struct Bytes {
    keys: u64,
    gradients: u64,
    heads: u64,
}

/// Predicts the problem of the arguments on `ranks` GPUs.
pub(crate) fn main(args: &ExplainArgs, ranks: usize, target: Target, tables: &Tables) -> Result<(), Failure> {
    let refuse = |what: &str| Err(Failure::input(format!("--ranks predicts self-attention {what}")));
    if args.k_len.is_some_and(|k_len| k_len != args.q_len) {
        return refuse("with as many keys as queries; leave --k-len out");
    }
    if args.window.is_some() {
        return refuse("without a window, where ranks compute equally long; leave --window out");
    }
    let problem = RankProblem {
        builder: args.unmasked(),
        sizes: [args.batch, args.q_len],
        heads: [args.heads, args.kv_heads.unwrap_or(args.heads)],
        causal: args.causal,
        backward: args.backward,
        ranks,
        steps: args.step_ms.map(|[first, later]| StepSeconds { first: first / 1e3, later: later / 1e3 }),
    };
    let mut link = args.link;
    if let Some(us) = args.latency {
        link.latency_seconds = us / 1e6;
    }
    let found = explain_ranks(&problem, link, target, tables)?;
    let strategy = |times: &RankTimes| {
        let RankBytes { keys, gradients, heads } = times.bytes;
        Strategy {
            us: times.seconds * 1e6,
            kernel_us: times.kernel_seconds * 1e6,
            message_us: times.message_seconds * 1e6,
            exposed_us: times.exposed_seconds() * 1e6,
            efficiency: found.one_seconds / (ranks as f64 * times.seconds),
            bytes_sent: Bytes { keys, gradients, heads },
        }
    };
    let results = Results {
        version: env!("CARGO_PKG_VERSION"),
        pass: if args.backward { "backward" } else { "forward" },
        problem: args.words(),
        ranks,
        measured_steps: args.step_ms.is_some(),
        link_gigabytes_per_second: link.bytes_per_second / 1e9,
        link_latency_us: link.latency_seconds * 1e6,
        one_us: found.one_seconds * 1e6,
        ring: strategy(&found.ring),
        ulysses: found.ulysses.as_ref().map(strategy).map_err(Clone::clone),
    };
    if args.json { json::print(&results) } else { say(&text(&results)) }
}

fn text(results: &Results) -> String {
    let kernels = match results.measured_steps {
        true => "steps as given",
        false => "kernels at their bound on an H200",
    };
    let (rate, latency) = (results.link_gigabytes_per_second, results.link_latency_us);
    let mut lines = vec![
        format!("{}, {} of {} ranks", results.problem, results.pass, results.ranks),
        format!("link {rate} GB/s each way and {latency:.0} us a message; {kernels}"),
        String::new(),
        format!("  one GPU  {:>10.1} us", results.one_us),
    ];
    let line = |name: &str, strategy: &Strategy| {
        let Strategy { us, kernel_us, exposed_us, efficiency, bytes_sent, .. } = strategy;
        let sent = (bytes_sent.keys + bytes_sent.gradients + bytes_sent.heads) as f64 / 1e6;
        format!(
            "  {name:<8} {us:>10.1} us, {:.0} % of {} GPUs: kernels {kernel_us:.1} us, waiting {exposed_us:.1} us, \
             {sent:.1} MB sent by each rank",
            efficiency * 100.0,
            results.ranks
        )
    };
    lines.push(line("ring", &results.ring));
    lines.push(match &results.ulysses {
        Ok(strategy) => line("ulysses", strategy),
        Err(refused) => format!("  ulysses  {refused}"),
    });
    lines.join("\n")
}
