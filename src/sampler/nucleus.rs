//! The order of tokens and their weights, and the cuts along that order. Linear in the vocabulary: partial selection,
//! never a sort.

/// The weight of the best token. The rounding is finer than that of an f32 softmax; tokens that are less than half a
/// billionth as likely as the best weigh nothing.
pub(super) const UNIT: u32 = 1 << 30;

/// `exp` of this or less, times `UNIT`, rounds to 0.
const NEGLIGIBLE: f32 = -21.5;

/// Logit and id in one integer, less for the better token: higher logit, then lower id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank(u64);

impl Rank {
    /// The rank of a masked token: none that can be drawn comes after it.
    pub(super) const LAST: Rank = Rank(0xff80_0000_ffff_ffff);

    pub(super) fn new(logit: f32, id: u32) -> Self {
        let bits = (logit + 0.0).to_bits(); // one zero, not two
        let descending = if bits >> 31 == 0 { !(bits | 1 << 31) } else { bits };
        Rank(u64::from(descending) << 32 | u64::from(id))
    }

    pub(super) fn logit(self) -> f32 {
        let descending = (self.0 >> 32) as u32;
        f32::from_bits(if descending >> 31 == 0 { !descending & !(1 << 31) } else { descending })
    }

    pub(super) fn id(self) -> u32 {
        self.0 as u32
    }
}

/// From logits to whole-number weights: `UNIT` for the best token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weigh {
    best: f32,
    inverse_temperature: f32,
}

impl Weigh {
    /// For a temperature above 0 and the largest of the logits.
    pub(super) fn new(best: f32, temperature: f64) -> Self {
        Weigh { best, inverse_temperature: (1.0 / temperature) as f32 }
    }

    fn exponent(self, logit: f32) -> f32 {
        (logit - self.best) * self.inverse_temperature
    }

    /// exp((logit - best) / temperature) in units, rounded. 2^y = 2^whole * 2^part; the latter by its Taylor series, whose
    /// first omitted term is 1.2e-7. Written out because it is most of a step's time: this becomes SIMD code, a call of
    /// `libm::expf` does not (151,936 logits at temperature 1 on wasm: 0.6 ms against 2.0).
    pub(super) fn weight(self, logit: f32) -> u32 {
        const SERIES: [f32; 7] = powers_of_ln2_over_factorials();
        const TO_NEAREST: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves no fraction bits
        let exponent = self.exponent(logit);
        let exponent = if exponent > NEGLIGIBLE { exponent } else { NEGLIGIBLE };
        let y = exponent * std::f32::consts::LOG2_E;
        let whole = (y + TO_NEAREST) - TO_NEAREST;
        let part = y - whole;
        let [a, b, c, d, e, f, g] = SERIES;
        let power = a + part * (b + part * (c + part * (d + part * (e + part * (f + part * g)))));
        let scale = f32::from_bits(((whole as i32 + 127 + 30) << 23) as u32); // 2^whole * UNIT
        (power * scale + 0.5) as i32 as u32
    }
}

/// ln(2)^k / k!, the Taylor coefficients of 2^x at 0.
const fn powers_of_ln2_over_factorials() -> [f32; 7] {
    let mut series = [1.0; 7];
    let (mut k, mut term) = (1, 1.0);
    while k < series.len() {
        term *= std::f64::consts::LN_2 / k as f64;
        series[k] = term as f32;
        k += 1;
    }
    series
}

/// Fills `pool` with the `k` best candidates, in no order; one pass, `2 k` entries at most.
pub(super) fn collect_best(logits: &[f32], k: usize, pool: &mut Vec<Rank>) {
    pool.clear();
    if k == 0 {
        return;
    }
    let full = k.saturating_mul(2).max(64);
    let mut bar = f32::NEG_INFINITY;
    let keep_k = |pool: &mut Vec<Rank>| {
        let (_, worst, _) = pool.select_nth_unstable(k - 1);
        let bar = worst.logit();
        pool.truncate(k);
        bar
    };
    for (id, &logit) in (0u32..).zip(logits) {
        // Ids ascend, so one that only equals the worst of k candidates loses against it.
        if logit > bar {
            pool.push(Rank::new(logit, id));
            if pool.len() == full {
                bar = keep_k(pool);
            }
        }
    }
    if pool.len() > k {
        keep_k(pool);
    }
}

/// Fills `pool` with all that may belong to a nucleus which leaves out a weight of `spare` at most. All tokens lighter than
/// `spare / n` together weigh less than that; half of it, for the rounding.
pub(super) fn collect_nucleus(logits: &[f32], weigh: Weigh, spare: u64, pool: &mut Vec<Rank>) {
    let lightest = spare as f64 / (2.0 * logits.len() as f64 * f64::from(UNIT));
    let lowest = (libm::log(lightest) as f32).max(NEGLIGIBLE);
    pool.clear();
    let candidates = logits.iter().zip(0u32..).filter(|(&logit, _)| weigh.exponent(logit) >= lowest);
    pool.extend(candidates.map(|(&logit, id)| Rank::new(logit, id)));
}

/// The last of the best candidates that together weigh `needed`: quickselect by weight, linear in the pool.
pub(super) fn nucleus_end(pool: &mut [Rank], weigh: Weigh, mut needed: u64) -> Rank {
    let mut rest = pool;
    while rest.len() > 1 {
        let middle = rest.len() / 2;
        rest.select_nth_unstable(middle);
        let (better, worse) = rest.split_at_mut(middle);
        let weight: u64 = better.iter().map(|rank| u64::from(weigh.weight(rank.logit()))).sum();
        if weight >= needed {
            rest = better;
        } else {
            needed -= weight;
            rest = worse;
        }
    }
    rest.first().copied().unwrap_or(Rank::LAST)
}
