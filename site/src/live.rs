//! Live pages: timelines, the mask playground, the roofline. Each carries its data and needs no server.

use crate::{layout, timeline, write};
use fulgurite::sim::{Architecture, Sizes};
use serde_json::{Value, json};
use std::error::Error;
use std::path::{Path, PathBuf};

#[cfg(test)]
thread_local! {
    /// Leaves the timelines out: a test of links need not simulate.
    pub static TEST_WITHOUT_SIMULATION: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// A kernel whose timeline is a page.
struct Shown {
    page: &'static str,
    title: &'static str,
    kernel: &'static str,
    sizes: Sizes,
}

fn shown() -> [Shown; 4] {
    let usual = Sizes::default();
    let attention = Sizes { q_len: 256, k_len: 1024, heads: 1, kv_heads: 1, blocks: 1, ..usual };
    [
        Shown {
            page: "timeline-forward",
            title: "Forward attention on Hopper",
            kernel: "attention-bf16-d128-full",
            sizes: attention,
        },
        Shown {
            page: "timeline-backward",
            title: "Gradients on Hopper",
            kernel: "backward-bf16-d128-full",
            sizes: Sizes { q_len: 640, k_len: 128, ..attention },
        },
        Shown {
            page: "timeline-gemm",
            title: "A matrix product on Hopper",
            kernel: "gemm-bf16-nt",
            sizes: Sizes { m: 256, n: 256, k: 1024, blocks: 1, ..usual },
        },
        Shown {
            page: "timeline-sync",
            title: "Forward attention on every GPU since Ampere",
            kernel: "attention-sync-bf16-d128-full",
            sizes: Sizes { q_len: 128, k_len: 192, ..attention },
        },
    ]
}

/// Writes all live pages.
pub fn write_all(root: &Path, folder: &Path) -> Result<(), Box<dyn Error>> {
    #[cfg(test)]
    let simulated = !TEST_WITHOUT_SIMULATION.with(std::cell::Cell::get);
    #[cfg(not(test))]
    let simulated = true;
    for one in shown().into_iter().filter(|_| simulated) {
        let data = timeline::of(root, one.kernel, &one.sizes)?;
        let body = format!(
            "<h1>{}</h1>\n<p>{}: {}. One CTA by the simulator's approximate clock: each row is a role of warps, the tensor cores or \
             TMA. Pale bars wait. Scroll or press + and - to zoom, drag to move, click a bar to see its Rust line, its PTX and \
             what it waited for.</p>\n{}",
            one.title,
            layout::escape(data["summary"].as_str().unwrap_or_default()),
            layout::escape(data["problem"].as_str().unwrap_or_default()),
            include_str!("../assets/timeline.html")
        );
        page(folder, one.page, one.title, "timeline.js", &body, &data)?;
    }
    page(folder, "masks", "Mask playground", "masks.js", include_str!("../assets/masks.html"), &Value::Null)?;
    let h200 = Architecture::H200;
    let sms = 132.0;
    let machine = json!({
        "name": "H200",
        "tensor_tflops": h200.tensor_flops * sms * h200.gigahertz / 1e3,
        "exponentials_per_second": h200.specials * sms * h200.gigahertz * 1e9,
        "bytes_per_second": h200.global_bytes * sms * h200.gigahertz * 1e9,
    });
    page(folder, "roofline", "Roofline", "roofline.js", include_str!("../assets/roofline.html"), &machine)
}

/// A page with its data in it; scripts of a page cannot be closed by what the data contains.
fn page(folder: &Path, name: &str, title: &str, script: &str, body: &str, data: &Value) -> Result<(), Box<dyn Error>> {
    let path = PathBuf::from("live").join(format!("{name}.html"));
    let data = data.to_string().replace('<', "\\u003c");
    let body = format!("{body}<script id=\"data\" type=\"application/json\">{data}</script>\n");
    let head = format!("<script src=\"{script}\" defer></script>\n");
    write(&folder.join(&path), &layout::page(&path, title, &body, &head))
}
