//! What all pages share: head, navigation, style.

use crate::markdown::relative;
use std::path::Path;

/// Files beside the pages.
pub const ASSETS: [(&str, &str); 5] = [
    ("style.css", include_str!("../assets/style.css")),
    ("site.js", include_str!("../assets/site.js")),
    ("live/timeline.js", include_str!("../assets/timeline.js")),
    ("live/masks.js", include_str!("../assets/masks.js")),
    ("live/roofline.js", include_str!("../assets/roofline.js")),
];

/// Sections of the navigation: page and title.
const SECTIONS: [(&str, &[(&str, &str)]); 5] = [
    (
        "Start",
        &[
            ("index.html", "Overview"),
            ("docs/guide/first-steps.html", "First steps (Rust)"),
            ("docs/guide/python.html", "Python"),
            ("docs/guide/migration.html", "Migration"),
            ("docs/guide/index.html", "All guide pages"),
        ],
    ),
    (
        "Live",
        &[
            ("live/timeline-forward.html", "Timeline: Hopper forward"),
            ("live/timeline-backward.html", "Timeline: Hopper gradients"),
            ("live/timeline-gemm.html", "Timeline: matrix product"),
            ("live/timeline-sync.html", "Timeline: Ampere forward"),
            ("live/masks.html", "Mask playground"),
            ("live/roofline.html", "Roofline"),
        ],
    ),
    (
        "Measured",
        &[("docs/lab/results/gpu.html", "H200"), ("docs/lab/results/cpu.html", "CPU"), ("docs/lab/index.html", "Lab")],
    ),
    (
        "Inside",
        &[
            ("ARCHITECTURE.html", "Architecture"),
            ("docs/decisions/index.html", "Decisions"),
            ("docs/guide/writing-a-kernel.html", "Writing a kernel"),
            ("docs/guide/debugging-without-a-gpu.html", "Debugging without a GPU"),
        ],
    ),
    (
        "Words",
        &[
            ("docs/guide/glossary.html", "Glossary"),
            ("docs/references.html", "Papers"),
            ("CHANGELOG.html", "Changelog"),
            ("docs/release-notes-0.1.0.html", "Release notes"),
        ],
    ),
];

/// Text as HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A whole page; `head` is added to its head.
pub fn page(path: &Path, title: &str, body: &str, head: &str) -> String {
    let to = |file: &str| relative(path, Path::new(file));
    let mut nav = String::new();
    for (name, pages) in SECTIONS {
        nav += &format!("<h2>{name}</h2>\n<ul>\n");
        for (file, words) in pages {
            let here = if path == Path::new(file) { " aria-current=\"page\"" } else { "" };
            nav += &format!("<li><a href=\"{}\"{here}>{words}</a></li>\n", to(file));
        }
        nav += "</ul>\n";
    }
    let (title, style, script, home) = (escape(title), to("style.css"), to("site.js"), to("index.html"));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title} - fulgurite</title>\n\
         <link rel=\"icon\" href=\"data:,\">\n<link rel=\"stylesheet\" href=\"{style}\">\n<script src=\"{script}\" defer></script>\n{head}</head>\n<body>\n\
         <header><a class=\"home\" href=\"{home}\">fulgurite</a></header>\n\
         <details class=\"menu\"><summary>Pages</summary><nav>{nav}</nav></details>\n\
         <nav class=\"side\">{nav}</nav>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
}
