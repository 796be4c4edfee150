//! Lines over two axes, as an SVG picture: enough for the examples' curves.

use std::fmt::Write;

/// One line, or dots where `dots` is set.
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    pub dots: bool,
}

/// A picture; the vertical axis counts powers of ten where `powers` is set.
pub struct Plot {
    pub title: String,
    pub x: String,
    pub y: String,
    pub powers: bool,
    pub series: Vec<Series>,
}

const COLORS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#4d4d4d"];
const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 56.0;

impl Plot {
    /// As SVG text.
    pub fn svg(&self) -> String {
        let up = |y: f64| if self.powers { y.max(1e-12).log10() } else { y };
        let all = || self.series.iter().flat_map(|s| &s.points);
        let span = |of: &dyn Fn(&(f64, f64)) -> f64| {
            let values = || all().map(of);
            let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
            if high > low { (low, high) } else { (low - 1.0, low + 1.0) }
        };
        let (xs, ys) = (span(&|p| p.0), span(&|p| up(p.1)));
        let place = |x: f64, y: f64| {
            let (w, h) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
            (LEFT + w * (x - xs.0) / (xs.1 - xs.0), HEIGHT - BOTTOM - h * (up(y) - ys.0) / (ys.1 - ys.0))
        };
        let mut svg = format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="13"><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/><text x="20" y="28" font-size="17" font-weight="bold">{}</text>"##,
            self.title
        );
        for i in 0..=5 {
            let share = f64::from(i) / 5.0;
            let (x, y) = (xs.0 + share * (xs.1 - xs.0), ys.0 + share * (ys.1 - ys.0));
            let y = if self.powers { 10f64.powf(y) } else { y };
            let (px, py) = place(x, y);
            let label = if self.powers { format!("{y:.0e}") } else { format!("{y:.3}") };
            let right = WIDTH - RIGHT;
            let _ = write!(svg, r##"<path d="M{LEFT} {py:.1}H{right}" stroke="#d8dee4"/>"##);
            let _ = write!(svg, r#"<text x="{}" y="{:.1}" text-anchor="end">{label}</text>"#, LEFT - 8.0, py + 4.0);
            let label = if xs.1 - xs.0 > 20.0 { format!("{x:.0}") } else { format!("{x:.2}") };
            let below = HEIGHT - BOTTOM + 18.0;
            let _ = write!(svg, r#"<text x="{px:.1}" y="{below}" text-anchor="middle">{label}</text>"#);
        }
        let (middle, low) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 14.0);
        let _ = write!(svg, r#"<text x="{middle}" y="{low}" text-anchor="middle">{}</text>"#, self.x);
        let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
        let _ = write!(
            svg,
            r#"<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{}</text>"#,
            self.y
        );
        for (i, series) in self.series.iter().enumerate() {
            let color = COLORS[i % COLORS.len()];
            let points: Vec<(f64, f64)> = series.points.iter().map(|&(x, y)| place(x, y)).collect();
            if series.dots {
                for (x, y) in &points {
                    let _ = write!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{color}"/>"#);
                }
            }
            let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = write!(
                svg,
                r#"<polyline points="{}" fill="none" stroke="{color}" stroke-width="1.6"/>"#,
                path.join(" ")
            );
            let (x, y) = (WIDTH - RIGHT + 16.0, TOP + 10.0 + 20.0 * i as f64);
            let _ = write!(svg, r#"<rect x="{x}" y="{}" width="12" height="12" fill="{color}"/>"#, y - 10.0);
            let _ = write!(svg, r#"<text x="{}" y="{y}">{}</text>"#, x + 18.0, series.name);
        }
        svg.push_str("</svg>\n");
        svg
    }
}
