//! What a load does last: every kernel is touched, and the machine is measured for the slice and the threads that suit it.

use super::Engine;
use crate::error::Result;
use crate::kernels::parallel::{set_most_threads, threads};
use crate::metrics::ms_since;
use crate::model::{Advance, Want};
use web_time::Instant;

/// Layers that the warm-up runs: others have the same kernels, and a whole pass of a 0.5B takes 150 ms.
const LAYERS: usize = 3;

/// What each number of threads is timed on: this many layers of this many tokens.
const TIMED_LAYERS: usize = 6;
const TIMED_TOKENS: usize = 4;

/// A token may take this much longer with a number of threads that is chosen all the same.
const HARDLY_SLOWER: f64 = 1.03;

impl Engine {
    /// Touches every kernel once, in prefill and in decode, and learns how long a slice may be here.
    pub fn warm_up(&mut self) -> Result<()> {
        let n = 8.min(self.context_length);
        let begun = Instant::now();
        let ran = self.run_layers(&vec![0; n], LAYERS, Want::Nothing)?;
        self.schedule.measured(n, ms_since(begun) / ran.max(1) as f64);
        self.run_layers(&[0], LAYERS, Want::Nothing)?;
        Ok(())
    }

    /// Runs at most so many layers on tokens that nothing is kept of; says how many.
    fn run_layers(&self, tokens: &[u32], most: usize, want: Want) -> Result<usize> {
        let mut cache = self.model.new_cache();
        let mut pass = self.model.start(tokens, &mut cache, want)?;
        let mut ran = 0;
        while ran < most {
            ran += 1;
            if matches!(self.model.advance(&mut pass, &mut cache)?, Advance::Done(_)) {
                break;
            }
        }
        Ok(ran)
    }

    /// Times a token with each number of threads that there is, and from then on uses the largest that is hardly slower
    /// than the fastest: a token waits for the memory, and slow or shared cores may only hold the others up, but a
    /// prompt gains from each. Returns the number.
    pub fn choose_threads(&mut self) -> Result<usize> {
        set_most_threads(usize::MAX);
        let most = threads();
        if most == 1 {
            return Ok(1);
        }
        let mut times = vec![[f64::INFINITY; TIMED_LAYERS]; most];
        for _ in 0..TIMED_TOKENS {
            for (times, n) in times.iter_mut().zip(1..) {
                set_most_threads(n);
                let mut cache = self.model.new_cache();
                let mut pass = self.model.start(&[0], &mut cache, Want::Nothing)?;
                for best in times {
                    let begun = Instant::now();
                    let done = matches!(self.model.advance(&mut pass, &mut cache)?, Advance::Done(_));
                    *best = best.min(ms_since(begun));
                    if done {
                        break;
                    }
                }
            }
        }
        let totals = times.iter().map(|layers| layers.iter().filter(|ms| ms.is_finite()).sum::<f64>());
        let fastest = totals.clone().fold(f64::INFINITY, f64::min);
        let chosen = totals.clone().rposition(|ms| ms <= HARDLY_SLOWER * fastest).map_or(most, |at| at + 1);
        set_most_threads(chosen);
        Ok(chosen)
    }
}
