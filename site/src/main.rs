//! Builds the site: `fulgurite-site FOLDER`. Everything comes from this repository; nothing is fetched.

#![forbid(unsafe_code)]

mod layout;
mod live;
mod markdown;
mod timeline;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

/// Pages outside `docs` that belong to the site.
const FRONT: [&str; 6] =
    ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "bench/README.md"];

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder] = &args[..] else { return Err("usage: fulgurite-site FOLDER".into()) };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("the package has no parent folder")?;
    build(root, Path::new(folder))
}

/// Writes all pages of the repository at `root` into `folder`.
fn build(root: &Path, folder: &Path) -> Result<(), Box<dyn Error>> {
    let mut sources: BTreeSet<PathBuf> = FRONT.iter().map(PathBuf::from).collect();
    collect(root, Path::new("docs"), &mut sources)?;
    let texts: Result<BTreeMap<PathBuf, String>, std::io::Error> =
        sources.into_iter().map(|path| Ok((path.clone(), fs::read_to_string(root.join(&path))?))).collect();
    let texts = texts?;
    let mut linked = BTreeSet::new();
    for (path, text) in &texts {
        let page = markdown::convert(root, path, text, &texts);
        linked.extend(page.files);
        let out = markdown::page_of(path);
        write(&folder.join(&out), &layout::page(&out, &page.title, &page.body, ""))?;
    }
    for path in linked {
        copy(root, folder, &path)?;
    }
    for (name, text) in layout::ASSETS {
        write(&folder.join(name), text)?;
    }
    live::write_all(root, folder)?;
    println!("{}", folder.display());
    Ok(())
}

/// Markdown files below a folder.
fn collect(root: &Path, folder: &Path, found: &mut BTreeSet<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            collect(root, &path, found)?;
        } else if path.extension().is_some_and(|end| end == "md") {
            found.insert(path);
        }
    }
    Ok(())
}

/// A file of the repository that a page links to: pictures and data as they are, source as a page.
fn copy(root: &Path, folder: &Path, path: &Path) -> Result<(), Box<dyn Error>> {
    if markdown::served_as_it_is(path) {
        let bytes = fs::read(root.join(path))?;
        let out = folder.join(path);
        fs::create_dir_all(out.parent().unwrap_or(folder))?;
        return Ok(fs::write(out, bytes)?);
    }
    let text = fs::read_to_string(root.join(path))?;
    let name = path.display().to_string();
    let body =
        format!("<h1><code>{}</code></h1>\n<pre><code>{}</code></pre>\n", layout::escape(&name), layout::escape(&text));
    let out = markdown::page_of(path);
    write(&folder.join(&out), &layout::page(&out, &name, &body, ""))
}

/// Writes a file, and the folders on its way.
fn write(path: &Path, text: &str) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    Ok(fs::write(path, text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Links of a page that stay in the site.
    fn inner_links(html: &str) -> Vec<String> {
        let parts = html.split(" href=\"").skip(1).chain(html.split(" src=\"").skip(1));
        let targets = parts.filter_map(|part| part.split('"').next());
        targets.filter(|target| !target.contains("://") && !target.starts_with("data:")).map(String::from).collect()
    }

    /// Every page but the timelines, which take a simulation each.
    #[test]
    fn links_of_the_site_lead_to_files() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let folder = std::env::temp_dir().join(format!("fulgurite-site-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        live::TEST_WITHOUT_SIMULATION.with(|flag| flag.set(true));
        build(root, &folder).unwrap();
        let mut pages = Vec::new();
        fn html(folder: &Path, pages: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(folder).unwrap().flatten() {
                match entry.path() {
                    path if path.is_dir() => html(&path, pages),
                    path if path.extension().is_some_and(|end| end == "html") => pages.push(path),
                    _ => {}
                }
            }
        }
        html(&folder, &mut pages);
        assert!(pages.len() > 80, "{} pages", pages.len());
        let mut broken = Vec::new();
        for page in &pages {
            for target in inner_links(&fs::read_to_string(page).unwrap()) {
                let file = target.split('#').next().unwrap_or_default();
                if !file.is_empty() && !page.parent().unwrap().join(file).exists() {
                    broken.push(format!("{}: {target}", page.display()));
                }
            }
        }
        fs::remove_dir_all(&folder).unwrap();
        broken.retain(|line| !line.contains("live/timeline-"));
        assert!(broken.is_empty(), "{}", broken.join("\n"));
    }
}
