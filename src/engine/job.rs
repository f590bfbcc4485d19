//! A request under way: begun as a turn of its session, or as a kept answer that is given again, and stepped by the caller.

use super::truncation::ChatPrompt;
use super::{now_ms, Engine};
use crate::error::{Error, Result};
use crate::generation::{Finish, Progress, Step, Turn, TurnRequest};
use crate::metrics::{ms_since, RequestRecord, Timings};
use crate::openai::{extra, Body, Cache, Frame, Prompt};
use crate::response_cache::{Answer, Key};
use crate::session::Session;
use crate::stream::Parts;
use serde_json::Value;
use std::rc::Rc;
use web_time::Instant;

/// A chat or completion under way.
pub struct Job {
    frame: Frame,
    body: Body,
    work: Work,
    /// Whose session the turn works on; `None` for one that nothing is to stay of.
    session: Option<String>,
    begun: bool,
    text: Parts,
    ids: Vec<u32>,
    /// Where the answer is to be kept, and what it is so far.
    keep: Option<(Key, Answer)>,
    /// Messages that are not in the prompt.
    left_out: usize,
    arrived: Instant,
    timings: Timings,
}

/// What a step of a job came to.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Chunks to send, in order.
    pub chunks: Vec<Value>,
    /// The end: the whole reply, or null after a stream.
    pub done: Option<Value>,
}

/// What a job's answer comes of.
// There is one job at a time.
#[allow(clippy::large_enum_variant)]
enum Work {
    Turn(Turn),
    Replay { prompt_tokens: usize, answer: Rc<Answer> },
}

impl Work {
    fn progress(&self) -> Progress {
        match self {
            Work::Turn(turn) => turn.progress(),
            Work::Replay { prompt_tokens, answer } => Progress {
                prompt_tokens: *prompt_tokens,
                reused_tokens: *prompt_tokens,
                completion_tokens: answer.completion_tokens,
                ..Default::default()
            },
        }
    }
}

impl Engine {
    /// Starts a request whose body was parsed; `arrived` is when it came, `random_seed` serves where it has no seed.
    pub fn begin(&mut self, body: Body, arrived: Instant, random_seed: u64) -> Result<Job> {
        let queue_ms = ms_since(arrived);
        let begun = Instant::now();
        self.end_ahead();
        let body = self.normalized(body)?;
        // Requests without a session id share one nameless session, but for those that leave nothing shared.
        let session = match (&body.session_id, body.cache) {
            (None, Cache::Off) => None,
            (id, _) => Some(id.clone().unwrap_or_default()),
        };
        let ChatPrompt { ids: prompt, reasoning, left_out } = match &body.prompt {
            Prompt::Chat(chat) => self.fitting_prompt(chat, &body, session.as_deref())?,
            Prompt::Text(text) => ChatPrompt { ids: self.text_prompt(text)?, ..Default::default() },
            Prompt::Tokens(ids) => ChatPrompt { ids: ids.clone(), ..Default::default() },
        };
        if let Some(most) = self.sessions.limits().max_input_tokens.filter(|most| prompt.len() > *most) {
            return Err(Error::context_overflow(format!(
                "the prompt has {} tokens, maxInputTokens is {most}",
                prompt.len()
            )));
        }
        let tokenize_ms = ms_since(begun);
        let now = now_ms();
        let key = match body.cache {
            Cache::Off => None,
            _ => Key::of(&prompt, &body.params, reasoning),
        };
        self.requests += 1;
        let kept = key.filter(|_| body.cache == Cache::Auto).and_then(|key| self.responses.get(&key, now));
        let work = match kept {
            Some(answer) => {
                // The session is in use, though nothing is added to it.
                let name = session.as_deref().unwrap_or_default();
                if let Some(session) = self.sessions.take(name, now) {
                    self.sessions.put(name, session, now);
                }
                Work::Replay { prompt_tokens: prompt.len(), answer }
            }
            None => Work::Turn(self.turn(&body, prompt, reasoning, session.as_deref(), random_seed)?),
        };
        let keep = match work {
            Work::Turn(_) => key.map(|key| (key, Answer::default())),
            Work::Replay { .. } => None,
        };
        let chat = matches!(body.prompt, Prompt::Chat(_));
        let frame = Frame {
            id: format!("{}-{:x}-{}", if chat { "chatcmpl" } else { "cmpl" }, now as u64, self.requests),
            created: (now / 1e3) as u64,
            model: self.name.clone(),
            chat,
        };
        Ok(Job {
            frame,
            body,
            work,
            session,
            begun: false,
            text: Parts::default(),
            ids: Vec::new(),
            keep,
            left_out,
            arrived,
            timings: Timings { queue_ms, tokenize_ms, ..Default::default() },
        })
    }

    /// Takes the session, or a new one, with the longest beginning of the prompt that is there.
    fn turn(
        &mut self,
        body: &Body,
        prompt: Vec<u32>,
        reasoning: Option<bool>,
        name: Option<&str>,
        random_seed: u64,
    ) -> Result<Turn> {
        let request = TurnRequest {
            prompt,
            reasoning,
            params: body.params.clone(),
            context_length: self.context_length,
            random_seed,
            never: self.text.never.clone(),
            shares: body.cache != Cache::Off,
            speculates: self.speculation,
        };
        request.check(&self.model)?;
        self.check_room(request.prompt.len())?;
        let now = now_ms();
        let own = name.and_then(|name| self.sessions.take(name, now));
        let mut session = own.unwrap_or_else(|| Session::new(self.new_cache(), now));
        if body.cache != Cache::Off {
            self.sessions.share(&mut session, &request.prompt);
        }
        Ok(Turn::new(self.requests, &self.model, self.text.tokenizer.as_ref(), session, request))
    }

    /// As [`Engine::step_all`], of a job that is alone.
    pub fn step(&mut self, job: &mut Job) -> Result<Outcome> {
        let outcome = self.step_all(&mut [job]).pop();
        outcome.map_or(Ok(Outcome::default()), |(_, outcome)| outcome)
    }

    /// Works on all jobs for a bounded time; what came of which of them. They must be given in the order in which they were
    /// begun. After its end, and after an error, a job must be given to [`Engine::drop_job`].
    pub fn step_all(&mut self, jobs: &mut [&mut Job]) -> Vec<(usize, Result<Outcome>)> {
        let mut outcomes = Vec::new();
        for (at, job) in jobs.iter_mut().enumerate() {
            if let Work::Replay { answer, .. } = &job.work {
                let answer = answer.clone();
                outcomes.push((at, Ok(self.replay(job, &answer))));
            }
        }
        if !outcomes.is_empty() {
            return outcomes;
        }
        let mut turns: Vec<&mut Turn> = jobs.iter_mut().filter_map(|job| job.turn_mut()).collect();
        let stepped = self.schedule.step(&self.model, self.text.tokenizer.as_ref(), &mut turns);
        for (at, steps) in stepped {
            match steps {
                // The turn is as it was before; the next step tries the same again.
                Err(Error::OutOfMemory(why)) => {
                    outcomes.extend(self.make_room(why).err().map(|error| (at, Err(error))));
                }
                steps => outcomes.push((at, steps.map(|steps| self.outcome(jobs[at], steps)))),
            }
        }
        outcomes
    }

    fn outcome(&mut self, job: &mut Job, steps: Vec<Step>) -> Outcome {
        let mut all = Outcome::default();
        for step in steps {
            match step {
                Step::Delta(parts, ids) => all.chunks.extend(job.take(parts, ids, None)),
                Step::Finished(parts, ids, finish) => {
                    let mut end = self.end(job, parts, ids, finish);
                    all.chunks.append(&mut end.chunks);
                    all.done = end.done;
                }
            }
        }
        all
    }

    /// The whole kept answer, in the deltas that it came in.
    fn replay(&mut self, job: &mut Job, answer: &Answer) -> Outcome {
        let mut chunks = Vec::new();
        let mut deltas = answer.deltas.iter().cloned();
        let (parts, ids) = deltas.next_back().unwrap_or_default();
        for (parts, ids) in deltas {
            chunks.extend(job.take(parts, ids, None));
        }
        let mut outcome = self.end(job, parts, ids, answer.finish.unwrap_or(Finish::Stop));
        chunks.append(&mut outcome.chunks);
        Outcome { chunks, done: outcome.done }
    }

    /// Ends a job early; what was said so far stands.
    pub fn abort(&mut self, job: &mut Job) -> Outcome {
        let parts = match &mut job.work {
            Work::Turn(turn) => turn.abort(),
            Work::Replay { .. } => Parts::default(),
        };
        self.end(job, parts, Vec::new(), Finish::Abort)
    }

    /// Takes a job's session back, whatever became of it.
    pub fn drop_job(&mut self, job: Job) {
        let Job { body, session, text, work, .. } = job;
        let on_its_own = body.cache == Cache::Off;
        if let Work::Turn(turn) = work {
            let mut rest = turn.into_session();
            if !on_its_own {
                rest.offered = rest.tokens.len();
            }
            if let Some(name) = &session {
                self.sessions.put(name, rest, now_ms());
            }
        }
        // A template that refuses the answer will say so to who sends it.
        let _ = self.foresee(&body, &text.content, session.as_deref().filter(|_| !on_its_own));
    }

    fn end(&mut self, job: &mut Job, parts: Parts, ids: Vec<u32>, finish: Finish) -> Outcome {
        let mut chunks = job.take(parts, ids, Some(finish));
        let progress = job.work.progress();
        job.book(&progress);
        let cached = matches!(job.work, Work::Replay { .. });
        if let Some((key, mut answer)) = job.keep.take().filter(|_| finish != Finish::Abort) {
            (answer.finish, answer.completion_tokens) = (Some(finish), progress.completion_tokens);
            self.responses.put(key, answer, now_ms());
            self.keep_within();
        }
        let record = RequestRecord {
            timings: job.timings,
            prompt_tokens: progress.prompt_tokens,
            reused_tokens: progress.reused_tokens,
            detokenize_ms: progress.detokenize_ms,
            cached,
        };
        let session_id = job.body.session_id.as_deref();
        self.record(record, session_id, progress.completion_tokens);
        let extra = extra(session_id, &progress, &job.timings, cached, job.left_out);
        let ids = job.body.return_tokens.then_some(&job.ids[..]);
        let done = if job.body.stream {
            if job.body.include_usage {
                chunks.push(job.frame.usage_chunk(&progress));
            }
            if let Some(last) = chunks.last_mut() {
                last["qandle"] = extra;
            }
            Value::Null
        } else {
            let mut reply = job.frame.reply(&job.text.content, &job.text.reasoning, ids, finish, &progress);
            reply["qandle"] = extra;
            reply
        };
        Outcome { chunks, done: Some(done) }
    }
}

impl Job {
    /// Whether chunks are wanted.
    pub fn is_stream(&self) -> bool {
        self.body.stream
    }

    fn turn_mut(&mut self) -> Option<&mut Turn> {
        match &mut self.work {
            Work::Turn(turn) => Some(turn),
            Work::Replay { .. } => None,
        }
    }

    /// Whether anything was given out yet.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Adds new text and makes its chunk, if one is wanted.
    fn take(&mut self, parts: Parts, ids: Vec<u32>, finish: Option<Finish>) -> Vec<Value> {
        if self.timings.ttft_ms == 0.0 {
            self.timings.ttft_ms = ms_since(self.arrived);
        }
        let mut chunks = Vec::new();
        if self.body.stream {
            if !self.begun && self.frame.chat {
                chunks.push(self.frame.opening());
            }
            let shown = self.body.return_tokens.then_some(&ids[..]);
            if finish.is_some() || shown.is_some() || !parts.content.is_empty() || !parts.reasoning.is_empty()
            {
                chunks.push(self.frame.chunk(&parts.content, &parts.reasoning, shown, finish));
            }
        }
        self.begun = true;
        if let Some((_, answer)) = &mut self.keep {
            answer.deltas.push((parts.clone(), ids.clone()));
        }
        self.text.content.push_str(&parts.content);
        self.text.reasoning.push_str(&parts.reasoning);
        self.ids.extend(ids);
        chunks
    }

    fn book(&mut self, p: &Progress) {
        let per_second = |tokens: usize, ms: f64| if ms > 0.0 { tokens as f64 * 1e3 / ms } else { 0.0 };
        self.timings.prefill_ms = p.prefill_ms;
        self.timings.decode_ms = p.decode_ms;
        self.timings.total_ms = ms_since(self.arrived);
        self.timings.prefill_tokens_per_second = per_second(p.prompt_tokens - p.reused_tokens, p.prefill_ms);
        self.timings.decode_tokens_per_second =
            per_second(p.completion_tokens.saturating_sub(1), p.decode_ms);
    }
}
