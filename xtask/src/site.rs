//! `cargo xtask site`, and its test in a browser.

use crate::steps::{Trouble, must, works};
use crate::{build_programs, program, target};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Loads every page in a frame of each width, looks for overflow and errors, and tries the live pages.
const CHECKS: &str = include_str!("site_checks.html");
/// A run in one colour scheme ends by then, or the test fails.
const LIMIT: Duration = Duration::from_secs(600);

fn folder() -> PathBuf {
    target().join("site")
}

/// Builds the site in `target/site`, without a network.
pub fn build() -> Result<(), Trouble> {
    let folder = folder();
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(Trouble::fail)?;
    }
    build_programs()?;
    must(program("fulgurite-site").arg(&folder))
}

/// Builds the site, and opens every page of it in a browser.
pub fn build_and_browse() -> Result<(), Trouble> {
    build()?;
    browse(&folder())
}

/// Opens every page of a built site in Chromium at 360 and 1440 points, light and dark.
pub fn browse(folder: &Path) -> Result<(), Trouble> {
    let found = ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|name| works(Command::new(name).arg("--version")));
    let Some(browser) = found else {
        return Err(Trouble::skip("no Chromium was found; on Debian: apt-get install chromium"));
    };
    let mut pages = Vec::new();
    html(folder, folder, &mut pages);
    if pages.is_empty() {
        return Err(Trouble::fail(format!("{} has no pages", folder.display())));
    }
    pages.sort();
    println!("{} pages", pages.len());
    for scheme in ["light", "dark"] {
        let faults = open_all(browser, folder, &pages, scheme)?;
        if !faults.is_empty() {
            return Err(Trouble::fail(format!("{scheme}:\n{}", faults.join("\n"))));
        }
    }
    Ok(())
}

/// Pages below a folder, by their paths in it.
fn html(root: &Path, folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            html(root, &path, found);
        } else if path.extension().is_some_and(|end| end == "html") {
            let inside = path.strip_prefix(root).unwrap_or(&path);
            found.push(inside.to_string_lossy().replace('\\', "/"));
        }
    }
}

/// What a browser of one colour scheme found wrong.
fn open_all(browser: &str, folder: &Path, pages: &[String], scheme: &str) -> Result<Vec<String>, Trouble> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(Trouble::fail)?;
    let port = listener.local_addr().map_err(Trouble::fail)?.port();
    listener.set_nonblocking(true).map_err(Trouble::fail)?;
    let profile = target().join("site-browser");
    // 0 is dark and 1 is light in Blink's settings.
    let preferred = format!("--blink-settings=preferredColorScheme={}", u8::from(scheme == "light"));
    let mut child = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--window-size=1600,1000",
        ])
        .args([
            preferred,
            format!("--user-data-dir={}", profile.display()),
            format!("http://127.0.0.1:{port}/checks?{scheme}"),
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| Trouble::fail(format!("`{browser}` could not be started: {e}")))?;
    let (start, mut answer) = (Instant::now(), None);
    let (sender, results) = mpsc::channel();
    while answer.is_none() && start.elapsed() < LIMIT {
        match listener.accept() {
            // A browser opens connections ahead of its requests: each waits in a thread of its own.
            Ok((stream, _)) => {
                let (sender, folder, pages) = (sender.clone(), folder.to_path_buf(), pages.to_vec());
                std::thread::spawn(move || {
                    if let Some(result) = serve(stream, &folder, &pages) {
                        // The receiver is gone when the time is over.
                        let _ = sender.send(result);
                    }
                });
            }
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
        answer = results.try_recv().ok();
    }
    let _ = child.kill();
    let _ = child.wait();
    let answer = answer.ok_or_else(|| Trouble::fail(format!("{scheme}: the browser did not finish in {LIMIT:?}")))?;
    println!("{scheme}: {} s", start.elapsed().as_secs());
    Ok(answer.lines().filter(|line| !line.is_empty()).map(String::from).collect())
}

/// Answers one request; the body of a POST is the result of the checks.
fn serve(stream: TcpStream, folder: &Path, pages: &[String]) -> Option<String> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let mut reader = BufReader::new(&stream);
    let mut request = String::new();
    reader.read_line(&mut request).ok()?;
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        if header.trim().is_empty() {
            break;
        }
        if let Some(value) = header.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let path = request.split(' ').nth(1)?.split('?').next()?.trim_start_matches('/');
    if request.starts_with("POST") {
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        reply(&stream, "200 OK", "text/plain", b"");
        return Some(String::from_utf8_lossy(&body).into_owned());
    }
    if path == "checks" {
        let list: Vec<String> = pages.iter().map(|page| format!("{page:?}")).collect();
        reply(&stream, "200 OK", "text/html", CHECKS.replace("/* PAGES */", &list.join(",")).as_bytes());
        return None;
    }
    let kind = match path.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css",
        Some("js") => "text/javascript",
        Some("svg") => "image/svg+xml",
        _ => "text/plain",
    };
    let outside = path.split('/').any(|part| part == "..");
    match std::fs::read(folder.join(path)) {
        Ok(bytes) if !outside => reply(&stream, "200 OK", kind, &bytes),
        _ => reply(&stream, "404 Not Found", "text/plain", b"not found"),
    }
    None
}

fn reply(mut stream: &TcpStream, status: &str, kind: &str, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    // A browser that went away is noticed by the limit.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}
