//! A page with the figures of a command and a scatter of its rows along their first two components.

use crate::Failure;
use crate::report::html::STYLE;
use fulgurite::neighbors::{Options, Pca, Points};
use maud::{DOCTYPE, PreEscaped, html};
use std::fmt::Write;

/// More dots than this hide each other, so that of more rows only a regular sample is shown.
const DOTS: usize = 4000;
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 640.0;
const EDGE: f64 = 24.0;
const NOISE: &str = "#c4c9cf";
/// Colours that colour-blind readers can tell apart; clusters beyond the last colour start again.
const COLORS: [&str; 12] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7b3294", "#8c510a", "#35978f", "#e7298a",
    "#4d4d4d", "#66a61e",
];

/// The page.
pub fn page(
    figures: &[(&'static str, String)],
    points: Points<'_>,
    labels: &[i32],
    options: Options,
) -> Result<String, Failure> {
    let svg = scatter(points, labels, options)?;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "fulgurite" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "fulgurite" }
                dl { @for (name, value) in figures { dt { (name) } dd { (value) } } }
                h2 { "Rows along their first two components" }
                (PreEscaped(svg))
                p { "Colours are clusters, grey is noise; where there are more than " (DOTS) " rows, a regular sample is shown." }
            }
        }
    };
    Ok(page.into_string())
}

/// Dots in the plane of the first two principal components; one dimension lies on a line.
fn scatter(points: Points<'_>, labels: &[i32], options: Options) -> Result<String, Failure> {
    let k = points.dim().min(points.len()).min(2);
    let found = Pca::new(k).options(options).fit(points)?;
    let step = points.len().div_ceil(DOTS);
    let all = found.transform(points)?;
    let at = |row: usize| (f64::from(all[row * k]), if k == 2 { f64::from(all[row * k + 1]) } else { 0.0 });
    let shown: Vec<usize> = (0..points.len()).step_by(step).collect();
    let bounds = |pick: fn((f64, f64)) -> f64| {
        let values = shown.iter().map(|&row| pick(at(row))).filter(|x| x.is_finite());
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)))
    };
    let place = |x: f64, (low, high): (f64, f64), size: f64| {
        let share = if high > low { (x - low) / (high - low) } else { 0.5 };
        EDGE + share * (size - 2.0 * EDGE)
    };
    let (across, up) = (bounds(|p| p.0), bounds(|p| p.1));
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="scatter of the rows"><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff" stroke="#d8dee4"/>"##
    );
    for row in shown {
        let (x, y) = at(row);
        if !(x.is_finite() && y.is_finite()) {
            continue;
        }
        let color = usize::try_from(labels[row]).map_or(NOISE, |label| COLORS[label % COLORS.len()]);
        let (x, y) = (place(x, across, WIDTH), HEIGHT - place(y, up, HEIGHT));
        let _ = write!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="2.2" fill="{color}" fill-opacity="0.7"/>"#);
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_a_dot_of_its_colour() {
        let data = [0.0, 0.0, 5.0, 1.0, 9.0, 2.0, 9.5, 2.5];
        let points = Points::new(&data, [4, 2]).unwrap();
        let svg = scatter(points, &[0, 0, 1, -1], Options::default()).unwrap();
        assert_eq!(svg.matches("<circle").count(), 4);
        assert_eq!([COLORS[0], COLORS[1], NOISE].map(|color| svg.matches(color).count()), [2, 1, 1]);
        // One column, and one row.
        assert!(scatter(Points::new(&data, [8, 1]).unwrap(), &[0; 8], Options::default()).is_ok());
        assert!(scatter(Points::new(&data, [1, 8]).unwrap(), &[0], Options::default()).is_ok());
        let many = vec![1.0; 10_000];
        let svg = scatter(Points::new(&many, [10_000, 1]).unwrap(), &vec![0; 10_000], Options::default()).unwrap();
        assert!(svg.matches("<circle").count() <= DOTS);
    }
}
