//! Latency and rate over size, ours and the others', as one SVG file.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::row::{Entry, Row};

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Lines = BTreeMap<String, Vec<(f64, f64)>>;

/// Draws the event-driven send latency and the write rate, each over the sizes that were measured.
pub(crate) fn draw(file: &Path, rows: &[Row]) -> Result<(), Box<dyn Error>> {
    let latency = lines(
        rows,
        |row| row.case.starts_with("latency/send/") && row.case.ends_with("/event"),
        Entry::time,
    );
    let rate = lines(
        rows,
        |row| row.case.starts_with("rate/write/") && row.case.ends_with("/d16b1s1"),
        |entry| entry.figures.as_ref()?.mb_per_s,
    );
    let canvas = SVGBackend::new(file, (1200, 520)).into_drawing_area();
    canvas.fill(&WHITE)?;
    let (left, right) = canvas.split_horizontally(600);
    let programs: BTreeSet<&String> = latency.keys().chain(rate.keys()).collect();
    let colors = programs.into_iter().zip(COLORS.into_iter().cycle());
    let colors = colors.collect();
    panel(
        &left,
        "Round trip of a send, waiting by event (us)",
        &latency,
        &colors,
    )?;
    panel(
        &right,
        "Writes, 16 in flight (10^6 bytes a second)",
        &rate,
        &colors,
    )?;
    canvas.present()?;
    Ok(())
}

fn lines(rows: &[Row], wanted: fn(&Row) -> bool, value: fn(&Entry) -> Option<f64>) -> Lines {
    let mut lines = Lines::new();
    for row in rows.iter().filter(|row| wanted(row)) {
        for entry in &row.entries {
            if let Some((size, value)) = row.size().zip(value(entry)) {
                let line = lines.entry(entry.who.clone()).or_default();
                line.push((f64::from(size), value));
            }
        }
    }
    for line in lines.values_mut() {
        line.sort_by(|a, b| f64::total_cmp(&a.0, &b.0));
    }
    lines
}

fn panel(
    area: &Canvas<'_>,
    title: &str,
    lines: &Lines,
    colors: &BTreeMap<&String, RGBColor>,
) -> Result<(), Box<dyn Error>> {
    let points = || lines.values().flatten();
    let Some((sizes, values)) = range(points().map(|p| p.0)).zip(range(points().map(|p| p.1)))
    else {
        return Ok(()); // nothing of the kind was measured
    };
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(sizes.log_scale(), values.log_scale())?;
    chart
        .configure_mesh()
        .x_desc("bytes")
        .x_label_formatter(&|size| format!("{size:.0}"))
        .y_label_formatter(&|value| format!("{value:.0}"))
        .draw()?;
    for (who, line) in lines {
        let color = colors[who];
        let width = if who == "ours" { 3 } else { 1 };
        chart
            .draw_series(
                LineSeries::new(line.iter().copied(), color.stroke_width(width)).point_size(3),
            )?
            .label(who)
            .legend(move |(x, y)| {
                PathElement::new([(x, y), (x + 18, y)], color.stroke_width(width))
            });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

/// A little wider than the values.
fn range(values: impl Iterator<Item = f64>) -> Option<std::ops::Range<f64>> {
    let values: Vec<f64> = values.collect();
    let low = values.iter().copied().reduce(f64::min)?;
    let high = values.iter().copied().reduce(f64::max)?;
    Some(low * 0.7..high * 1.4)
}

const COLORS: [RGBColor; 8] = [
    RGBColor(31, 119, 180),
    RGBColor(255, 127, 14),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(90, 90, 90),
    RGBColor(23, 150, 160),
];
