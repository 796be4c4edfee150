//! The report of `bench` as one page that needs nothing else.

use crate::bench::{Cell, Results};
use maud::{DOCTYPE, PreEscaped, html};

/// Of every page.
pub(crate) const STYLE: &str = "
body { font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; color: #1b1f24; background: #fff; max-width: 1040px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem } dt { color: #57606a } dd { margin: 0 }
svg { max-width: 100%; height: auto } code { background: #f2f4f6; padding: .1rem .3rem; border-radius: 3px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #d8dee4 } th { color: #57606a; font-weight: 600 }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left } .bad { color: #b42318; font-weight: 600 }
";

/// The page.
pub fn page(results: &Results, svg: &str) -> String {
    let wrong = results.cells.iter().filter(|cell| !cell.ok()).count();
    let wrong = wrong + results.around.iter().filter(|row| !row.ok).count();
    let all = results.cells.len() + results.around.len();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "fulgurite bench" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "fulgurite bench" }
                p {
                    @if wrong == 0 {
                        "Every result below was compared with the f64 oracle and is within the tolerance rule."
                    } @else {
                        span.bad { (wrong) " of " (all) " results are outside the tolerance rule." }
                    }
                }
                dl {
                    dt { "engine" } dd { (results.engine) }
                    dt { "machine" } dd { (results.machine.line()) }
                    dt { "caches" } dd { (results.machine.caches.join(", ")) }
                    dt { "instruction sets" } dd { (results.machine.instruction_sets.join(", ")) }
                    dt { "command" } dd { code { (results.command) } }
                    dt { "date" } dd { (results.date) }
                    dt { "version" } dd { "fulgurite " (results.version) }
                }
                h2 { "Speed" }
                (PreEscaped(svg))
                h2 { "All results" }
                table {
                    thead { tr {
                        th { "pass" } th { "dtype" } th { "mask" } th { "head dim" } th { "length" } th { "batch" } th { "heads" }
                        th { "ms" } th { "GFLOP/s" } th { "error" } th { "allowed" }
                    } }
                    tbody { @for cell in &results.cells { (row(cell)) } }
                }
                @if !results.around.is_empty() {
                    h2 { "Around attention: forward, in turn with causal attention of the same shape" }
                    table {
                        thead { tr {
                            th { "system" } th { "dtype" } th { "sizes" } th { "ms" } th { "attention ms" } th { "speed-up" }
                            th { "error / allowed" }
                        } }
                        tbody { @for row in &results.around { tr {
                            td { (row.system.name()) } td { (row.dtype) } td { (row.what) }
                            td { (format!("{:.2}", row.seconds * 1e3)) } td { (format!("{:.2}", row.attention_seconds * 1e3)) }
                            td { (format!("{:.2}", row.attention_seconds / row.seconds)) }
                            td class=[(!row.ok).then_some("bad")] { (format!("{:.2}", row.worst_share)) }
                        } } }
                    }
                }
                h2 { "How to read it" }
                p {
                    "Speed is the median of " (results.repeats) " runs. FLOPs of a forward pass: "
                    code { "4 · batch · heads · length² · head_dim" }
                    ", half of that for causal; of a backward pass 2.5 times as many. "
                    "Error and allowed are those of the tensor that came closest to its limit. The comparison covers "
                    "64 consecutive queries of random heads with all their keys; for the backward pass the gradient of "
                    "the output is zero outside these rows, because the gradients of keys and values sum over all rows."
                }
            }
        }
    }
    .into_string()
}

fn row(cell: &Cell) -> PreEscaped<String> {
    let worst = cell.worst();
    html! {
        tr {
            td { (cell.pass.name()) } td { (cell.dtype) } td { (cell.mask.name()) } td { (cell.head_dim) } td { (cell.len) }
            td { (cell.batch) } td { (cell.heads) } td { (format!("{:.2}", cell.seconds * 1e3)) }
            td { (format!("{:.1}", cell.gflops)) }
            @if let Some(worst) = worst {
                td.bad[!worst.ok] title=(worst.tensor) { (format!("{:.1e}", worst.error)) }
                td { (format!("{:.1e}", worst.allowed)) }
            } @else { td { "-" } td { "-" } }
        }
    }
}
