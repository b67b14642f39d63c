//! Medians and quantiles of small samples.

/// The value below which a share `q` (0 to 1) of the samples lies, by the nearest rank; `None` without samples.
pub fn quantile(samples: &[f64], q: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    sorted.get((last as f64 * q).round() as usize).copied()
}

/// The middle sample; `None` without samples.
pub fn median(samples: &[f64]) -> Option<f64> {
    quantile(samples, 0.5)
}

/// Half the distance from the lowest to the highest sample, as a share of the median: "± this much".
pub fn spread(samples: &[f64]) -> Option<f64> {
    let (low, high) = (quantile(samples, 0.0)?, quantile(samples, 1.0)?);
    Some((high - low) / 2.0 / median(samples)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_sample_in_any_order() {
        assert_eq!(median(&[5.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn the_spread_is_relative_to_the_median() {
        assert_eq!(spread(&[90.0, 100.0, 110.0]), Some(0.1));
    }
}
