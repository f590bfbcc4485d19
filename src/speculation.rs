//! Prompt-lookup speculation: what followed the same tokens earlier in the text is guessed to follow again, and one pass
//! verifies the guess (Saxena 2023; the matching is that of LZ77). Each guess is weighed by how often such guesses came
//! true and by what a pass over so many rows costs, so text that repeats nothing is not slowed down.

use std::collections::HashMap;

/// Tokens that must match before a place is looked at.
const SHORTEST: usize = 2;
/// A match is not measured beyond so many tokens.
const LONGEST: usize = 32;
/// Earlier places that are compared, the last ones first.
const PLACES: usize = 16;
/// Tokens without a match after which the place of the last guess is given up.
const STRAY: usize = 8;
/// Gain below which no guess is made: what is not measured costs something too.
const WORTH: f64 = 1.03;
/// How much one guess that came true, or did not, moves its kind's rate.
const LEARN: f64 = 0.15;

/// How often the next token of a guess comes true at first: of one that goes on where the last one went wrong, and by the
/// length of the match from 2, 3, 4, 8 and 16 tokens on.
const RATES: [f64; 6] = [0.4, 0.2, 0.4, 0.6, 0.75, 0.85];

/// What a pass over a few rows costs, in passes over one.
#[derive(Debug, Clone)]
pub struct Costs {
    ms: [f64; Self::ROWS.len()],
}

impl Default for Costs {
    fn default() -> Self {
        Self { ms: [f64::NAN; Self::ROWS.len()] }
    }
}

impl Costs {
    /// Numbers of rows that are told apart: the kernels' tiles.
    pub const ROWS: [usize; 5] = [1, 2, 4, 8, 16];
    /// What they cost before that is known.
    const GUESS: [f64; Self::ROWS.len()] = [1.0, 1.3, 1.7, 2.6, 4.6];
    /// Weight of a new measurement.
    const NEW: f64 = 0.25;

    /// Takes note of a pass over `rows` rows.
    pub fn book(&mut self, rows: usize, ms: f64) {
        if let Some(at) = Self::ROWS.iter().position(|n| *n == rows) {
            let known = &mut self.ms[at];
            *known = if known.is_nan() { ms } else { *known + Self::NEW * (ms - *known) };
        }
    }

    /// The cost of `rows` rows, which must be one of [`Costs::ROWS`].
    pub fn of(&self, rows: usize) -> f64 {
        let at = Self::ROWS.iter().position(|n| *n == rows).unwrap_or(Self::ROWS.len() - 1);
        let measured = self.ms[at] / self.ms[0];
        if measured.is_finite() {
            measured
        } else {
            Self::GUESS[at]
        }
    }

    #[cfg(test)]
    pub(crate) fn flat() -> Self {
        Self { ms: [1.0; Self::ROWS.len()] }
    }
}

/// Guesses for one text.
#[derive(Debug)]
pub struct Drafter {
    /// The last position that follows each pair of tokens.
    last: HashMap<[u32; SHORTEST], usize>,
    /// For each position, the one before it that follows the same pair; 0: none.
    earlier: Vec<usize>,
    /// Where the last guess would go on, and how many tokens ago it was made.
    source: Option<(usize, usize)>,
    /// What stands in the text for a token of the place that it is copied from.
    instead: HashMap<u32, u32>,
    rates: [f64; RATES.len()],
}

/// A place of the text to copy from, and its kind of match.
#[derive(Clone, Copy)]
struct Place {
    at: usize,
    kind: usize,
}

impl Drafter {
    /// For a text that begins with `history`.
    pub fn new(history: &[u32]) -> Self {
        let mut new = Self {
            last: HashMap::new(),
            earlier: Vec::new(),
            source: None,
            instead: HashMap::new(),
            rates: RATES,
        };
        new.index(history);
        new
    }

    /// At most `most` tokens that may follow `history`; none where that would not pay.
    pub fn draft(&self, history: &[u32], most: usize, costs: &Costs) -> Vec<u32> {
        let Some(place) = self.place(history) else { return Vec::new() };
        let rate = self.rates[place.kind];
        let gain = |guesses: usize| {
            let tokens = (1.0 - rate.powi(guesses as i32 + 1)) / (1.0 - rate);
            tokens / costs.of(guesses + 1)
        };
        let lengths = Costs::ROWS.iter().map(|rows| rows - 1).filter(|guesses| (1..=most).contains(guesses));
        let best = lengths.max_by(|a, b| gain(*a).total_cmp(&gain(*b)));
        best.filter(|guesses| gain(*guesses) > WORTH)
            .map_or(Vec::new(), |guesses| self.copy(history, place, guesses))
    }

    fn copy(&self, history: &[u32], place: Place, n: usize) -> Vec<u32> {
        let mut guesses = Vec::with_capacity(n);
        for i in place.at..place.at + n {
            // A text that repeats itself goes on in its own guesses.
            let token = history.get(i).copied().unwrap_or_else(|| guesses[i - history.len()]);
            guesses.push(*self.instead.get(&token).unwrap_or(&token));
        }
        guesses
    }

    /// The earlier place whose preceding tokens match the end of `history` furthest, of equals the last one.
    fn place(&self, history: &[u32]) -> Option<Place> {
        let end = history.len();
        let pair = history.last_chunk::<SHORTEST>()?;
        let mut places = std::iter::successors(self.last.get(pair).copied(), |at| Some(self.earlier[*at]))
            .take_while(|at| *at > 0)
            .take(PLACES);
        let matched = |at: usize| {
            let pairs = history[..at].iter().rev().zip(history[..end].iter().rev());
            pairs.take(LONGEST).take_while(|(a, b)| a == b).count()
        };
        let first = places.next().map(|at| (matched(at), at));
        let best = places.map(|at| (matched(at), at)).fold(first, |best, next| match best {
            Some(best) if best.0 >= next.0 => Some(best),
            _ => Some(next),
        });
        let kind = |matched: usize| match matched {
            ..3 => 1,
            3 => 2,
            4..8 => 3,
            8..16 => 4,
            _ => 5,
        };
        let longest = best.map(|(matched, at)| Place { at, kind: kind(matched) });
        let source = self.source.filter(|(at, _)| *at < end).map(|(at, _)| Place { at, kind: 0 });
        let rate = |place: &Place| self.rates[place.kind];
        longest.into_iter().chain(source).max_by(|a, b| rate(a).total_cmp(&rate(b)))
    }

    /// Takes note of what really followed: `guesses` were made before the last tokens of `history`, `right` of them came
    /// true, and one more token was sampled.
    pub fn learn(&mut self, history: &[u32], guesses: &[u32], right: usize) {
        let before = history.len() - right - 1;
        if let (false, Some(place)) = (guesses.is_empty(), self.place(&history[..before])) {
            let rate = &mut self.rates[place.kind];
            for i in 0..guesses.len().min(right + 1) {
                *rate += LEARN * (f64::from(i < right) - *rate);
            }
            self.source = Some((place.at + right + 1, 0));
            if let Some(wrong) = guesses.get(right) {
                let copied = history[place.at + right];
                let real = history[before + right];
                if copied == real {
                    self.instead.remove(&copied);
                } else if *wrong == copied {
                    self.instead.insert(copied, real);
                }
            }
        } else if let Some((at, age)) = self.source {
            self.source = (age < STRAY).then_some((at + 1, age + 1));
        }
        self.index(history);
    }

    /// Remembers every position of `history` that has a token and was not remembered yet.
    fn index(&mut self, history: &[u32]) {
        self.earlier.resize(self.earlier.len().max(SHORTEST), 0);
        for at in self.earlier.len()..history.len() {
            if let Some(pair) = history[..at].last_chunk::<SHORTEST>() {
                self.earlier.push(self.last.insert(*pair, at).unwrap_or(0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cheap() -> Costs {
        Costs::flat()
    }

    /// Lets a drafter guess a whole text; returns passes and guesses that were wrong.
    fn replay(prompt: &[u32], answer: &[u32], costs: &Costs) -> (usize, usize) {
        let mut drafter = Drafter::new(prompt);
        let mut history = prompt.to_vec();
        let (mut passes, mut wrong) = (0, 0);
        while history.len() < prompt.len() + answer.len() {
            let rest = &answer[history.len() - prompt.len()..];
            let guesses = drafter.draft(&history, rest.len() - 1, costs);
            assert!(guesses.len() < rest.len());
            let right = guesses.iter().zip(rest).take_while(|(a, b)| a == b).count();
            history.extend(&rest[..=right]);
            wrong += guesses.len() - right;
            passes += 1;
            drafter.learn(&history, &guesses, right);
        }
        assert_eq!(history[prompt.len()..], *answer);
        (passes, wrong)
    }

    #[test]
    fn a_text_that_is_repeated_takes_few_passes_and_one_that_is_not_no_guesses() {
        let text: Vec<u32> = (0..400).map(|i| i * 7919 % 1009).collect();
        let (passes, _) = replay(&text, &text[..200], &cheap());
        assert!(passes < 40, "{passes} passes for 200 tokens that stand in the prompt");
        let new: Vec<u32> = (0..200).map(|i| 2000 + i * 7919 % 1009).collect();
        assert_eq!(replay(&text, &new, &cheap()), (200, 0));
    }

    #[test]
    fn a_renamed_word_is_guessed_by_its_new_name() {
        let text: Vec<u32> = (0..300).map(|i| if i % 10 == 3 { 5000 } else { i }).collect();
        let renamed: Vec<u32> = text.iter().map(|t| if *t == 5000 { 6000 } else { *t }).collect();
        let (passes, wrong) = replay(&text, &renamed, &cheap());
        assert!(passes < 60 && wrong < 40, "{passes} passes, {wrong} wrong guesses for 300 tokens");
    }

    #[test]
    fn a_text_that_goes_round_is_guessed_beyond_its_end() {
        let round: Vec<u32> = (0..300).map(|i| i % 3).collect();
        let (passes, _) = replay(&round[..9], &round[9..], &cheap());
        assert!(passes < 40, "{passes} passes");
    }

    #[test]
    fn guesses_that_do_not_come_true_end() {
        // Every pair stands in the prompt, followed by something else each time.
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 28
        };
        let prompt: Vec<u32> = (0..1000).map(|_| random()).collect();
        let answer: Vec<u32> = (0..1000).map(|_| random()).collect();
        let (passes, wrong) = replay(&prompt, &answer, &Costs::default());
        assert!(wrong < 60, "{wrong} wrong guesses in {passes} passes");
        assert!(Drafter::new(&[]).draft(&[], 5, &cheap()).is_empty());
        assert!(Drafter::new(&[1]).draft(&[1], 5, &cheap()).is_empty());
    }
}
