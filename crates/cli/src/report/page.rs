//! Pages of `sim --open` and `explain --open`: one file each, which needs nothing else.

use crate::report::html::STYLE;
use crate::{Failure, io, say};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const MORE_STYLE: &str = "
.wide { overflow-x: auto; border: 1px solid #d8dee4; border-radius: 4px } .wide svg { max-width: none; width: 100%; display: block }
pre { background: #f2f4f6; padding: .6rem .8rem; overflow-x: auto; white-space: pre-wrap } .bar { background: #1f5fa8; height: .8rem; border-radius: 2px }
@media (prefers-color-scheme: dark) { body { background: #14171a; color: #d8dee4 } pre, code { background: #22272e } .wide { background: #d8dee4 } }
";

/// Makes the picture of a timeline wider and narrower, for details.
const ZOOM: &str = "
const picture = document.querySelector('.wide svg');
let zoom = 1;
for (const button of document.querySelectorAll('button')) button.onclick = () => {
  zoom = Math.min(64, Math.max(1, zoom * Number(button.value)));
  picture.style.width = 100 * zoom + '%';
};
";

/// A page with this title and body.
pub fn page(title: &str, body: &Markup) -> String {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(MORE_STYLE)) }
            }
            body { h1 { (title) } (body) }
        }
    }
    .into_string()
}

/// A timeline that can be made wider.
pub fn timeline(svg: &str) -> Markup {
    html! {
        p { button value="2" { "wider" } " " button value="0.5" { "narrower" } }
        div.wide { (PreEscaped(svg)) }
        script { (PreEscaped(ZOOM)) }
    }
}

/// Shares of something as bars: name, number, share of the largest.
pub fn bars<'a>(rows: impl Iterator<Item = (&'a str, String, f64)>) -> Markup {
    html! {
        table { @for (name, number, share) in rows { tr {
            td { (name) } td { (number) } td { (format!("{:.0} %", share * 100.0)) }
            td style="width: 50%" { div.bar style=(format!("width: {:.1}%", share.clamp(0.0, 1.0) * 100.0)) {} }
        } } }
    }
}

/// Writes a page as `out/NAME.html` and opens it in the browser; says where it is unless JSON is printed.
pub fn open(name: &str, page: &str, quiet: bool) -> Result<(), Failure> {
    let path: PathBuf = Path::new("out").join(name).with_extension("html");
    io::write_file(&path, page.as_bytes())?;
    let (program, before): (&str, &[&str]) = if cfg!(target_os = "macos") {
        ("open", &[])
    } else if cfg!(windows) {
        ("cmd", &["/C", "start", ""])
    } else {
        ("xdg-open", &[])
    };
    // Not waited for: some openers run as long as the browser.
    let opened = Command::new(program)
        .args(before)
        .arg(&path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .is_ok();
    match (quiet, opened) {
        (true, _) => Ok(()),
        (false, true) => say(&format!("page: {}", path.display())),
        (false, false) => say(&format!("page: {} (no browser was found; open it yourself)", path.display())),
    }
}
