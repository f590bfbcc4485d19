//! A remote file in order: chunks that are kept come from the store, the others from the network, several at once, and
//! are kept in passing.

use super::browser::{lock, sha256, Lock};
use super::keeper::Keeper;
pub use super::keeping::Hooks;
use super::keeping::{Shared, Task};
use super::manifest::{self, chunk_count, Manifest, CHUNK};
use super::opfs;
use super::remote::{First, Miss, Remote, Told};
use super::source::{Body, Place};
use super::stream::Stream;
use super::Store;
use crate::error::Error;
use js_sys::{Promise, Uint8Array};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use wasm_bindgen::JsValue;
use wasm_bindgen_futures::{future_to_promise, JsFuture};
use web_sys::AbortController;

/// Requests at once, where the caller says nothing else.
pub const AT_ONCE: usize = 4;
/// Chunks on their way at once: from the store that many, and enough to keep the requests busy.
const CHUNKS_AT_ONCE: usize = 4;
/// Chunks that are read but not kept yet: they take memory.
const UNKEPT: usize = 6;
/// Chunks that are held before a header is whole.
const HELD: usize = 4;

/// Bytes that are read at a time of a file that lies as one.
const PIECE: u64 = 1 << 20;

/// A file that lies as one, and how far it is read.
struct Stored {
    file: opfs::File,
    at: u64,
    bytes: u64,
    piece: Uint8Array,
}

/// A file that is read from its beginning to its end.
pub struct Reader {
    shared: Rc<Shared>,
    /// The body that is being read, before the tasks or instead of them.
    stream: Option<Stream>,
    tasks: VecDeque<Task>,
    /// The whole file, where it lies as one.
    file: Option<Stored>,
    /// The next chunk to start a task for.
    issued: usize,
    /// Chunks that came before it was said that the file is sound.
    held: Vec<(usize, Uint8Array)>,
    /// A new chunk that was given out: once the next is asked for, it can be kept, which takes its bytes away.
    given: Option<(usize, Uint8Array)>,
    /// Chunks that are being kept.
    keeps: VecDeque<Promise>,
    _lock: Option<Lock>,
}

impl Stored {
    /// `None` where it cannot be opened, because another tab has it open or for whatever reason, or is not whole.
    async fn open(row: &Manifest) -> Option<Self> {
        let file = opfs::File::read(opfs::WEIGHTS, &row.generation).await.ok()?;
        let whole = file.size().is_ok_and(|size| size == row.bytes as f64);
        let piece = Uint8Array::new_with_length(PIECE as u32);
        whole.then_some(Self { file, at: 0, bytes: row.bytes, piece })
    }

    fn next(&mut self) -> Result<Option<Uint8Array>, Error> {
        let n = PIECE.min(self.bytes - self.at);
        let piece = self.piece.subarray(0, n as u32);
        if n > 0 && !self.file.get_bytes(self.at, &piece).is_ok_and(|whole| whole) {
            return Err(Error::integrity("the stored file cannot be read"));
        }
        self.at += n;
        Ok((n > 0).then_some(piece))
    }
}

impl Reader {
    /// Opens a URL; of a file that is kept already nothing is asked of the network.
    ///
    /// # Errors
    /// `network`, `http_status`, `aborted`.
    pub async fn open(
        place: &Place,
        store: Option<Store>,
        at_once: usize,
        abort: &AbortController,
        hooks: Hooks,
    ) -> Result<Self, Error> {
        let find = || async {
            match &store {
                Some(store) => store.manifest(&place.key).await.ok().flatten(),
                None => None,
            }
        };
        let mut row = find().await;
        let mut held = None;
        if store.is_some() && !row.as_ref().is_some_and(Manifest::is_complete) {
            // Another tab may be loading the same file: what it keeps is not asked for again.
            held = Some(lock(&format!("qandle-model:{}", place.key), &abort.signal()).await);
            if abort.signal().aborted() {
                return Err(Error::aborted("the load was cancelled"));
            }
            row = find().await;
        }
        if let Some(row) = row.as_mut().filter(|row| row.url != place.url && !row.is_complete()) {
            // Another mirror goes on with it; its validators are not the first one's.
            row.url.clone_from(&place.url);
            (row.etag, row.last_modified) = (None, None);
        }
        let was_complete = row.as_ref().is_some_and(Manifest::is_complete);
        let mut file = None;
        if let Some(row) = row.as_ref().filter(|row| was_complete && row.place == manifest::Place::File) {
            file = Stored::open(row).await;
        }
        // Chunks that are there are read by it too; for few of them that is not worth a worker.
        let few = row.as_ref().is_some_and(|row| row.chunks.len() <= CHUNKS_AT_ONCE);
        let helps = store.is_some() && Keeper::is_worth_it() && file.is_none() && !(was_complete && few);
        let shared = Rc::new(Shared {
            remote: Remote::new(&place.url, at_once, &abort.signal())?,
            place: place.clone(),
            was_complete,
            keeper: if helps { hooks.post.as_ref().and_then(|post| Keeper::ask(post).ok()) } else { None },
            store,
            own_file: RefCell::new(None),
            spare: RefCell::default(),
            opening: Cell::new(false),
            keeping: Cell::new(row.is_some()),
            row: RefCell::new(row),
            refusal: RefCell::new(None),
            cached: Cell::new(0),
            hooks,
            writing: RefCell::new(None),
            waiting: RefCell::new(None),
        });
        if let Some(row) = &*shared.row.borrow() {
            shared.remote.expect(Told::of(row, &place.url));
        }
        let mut reader = Self {
            shared,
            stream: None,
            tasks: VecDeque::new(),
            file,
            issued: 0,
            held: Vec::new(),
            given: None,
            keeps: VecDeque::new(),
            _lock: held,
        };
        if reader.shared.row.borrow().is_none() {
            reader.begin().await?;
        }
        Ok(reader)
    }

    /// Whether everything is there.
    pub fn is_cached(&self) -> bool {
        self.shared.row.borrow().as_ref().is_some_and(Manifest::is_complete)
    }

    /// What the server told of the file.
    pub fn told(&self) -> Told {
        self.shared.remote.told()
    }

    /// Whether some of it came from the store, unhashed.
    pub fn was_partly_stored(&self) -> bool {
        self.shared.cached.get() > 0
    }

    /// The row of the file, where it is kept.
    pub fn row(&self) -> Option<Manifest> {
        self.shared.row.borrow().clone()
    }

    async fn begin(&mut self) -> Result<(), Error> {
        let first = self.shared.remote.first().await?;
        self.issued = 1;
        let (body, end) = match first {
            First::Range(body, end) => (body, Some(end)),
            First::Whole(body) => (body, None),
        };
        self.stream = Some(Stream::new(body, end));
        Ok(())
    }

    /// The header is whole: the file is so long (where the server did not tell), and from now on chunks are kept, if there
    /// is room for them.
    pub async fn planned(&mut self, end: u64, packed_bytes: u64, name: &str) {
        let shared = self.shared.clone();
        let known = shared.row.borrow().is_some();
        if let (false, Some(store)) = (known, &shared.store) {
            let told = shared.remote.told();
            let bytes = told.bytes.unwrap_or(end);
            if shared.has_room(bytes).await {
                let row = store.new_manifest(&shared.place, bytes).await.map(|mut row| {
                    (row.etag, row.last_modified, row.told_sha256) =
                        (told.etag, told.last_modified, told.sha256);
                    (row.name, row.packed_bytes) = (name.to_string(), packed_bytes);
                    row
                });
                // Before any chunk: what no row names is nobody's.
                let written = match row {
                    Ok(row) => store.put_manifest(&row).await.map(|()| row),
                    Err(refusal) => Err(refusal),
                };
                shared.keeping.set(true);
                match written {
                    Ok(row) => *shared.row.borrow_mut() = Some(row),
                    Err(refusal) => shared.refused(refusal).await,
                }
            }
        }
        if shared.remote.told().bytes.is_none() {
            shared.remote.expect(Told { bytes: Some(end), ..shared.remote.told() });
        }
        for (i, bytes) in std::mem::take(&mut self.held) {
            self.keep(i, bytes);
        }
        self.issue();
    }

    /// The next bytes of the file; `None` at its end.
    ///
    /// # Errors
    /// A file that changed under the reader is told apart from all else: it is read again from its beginning.
    pub async fn next(&mut self) -> Result<Option<Uint8Array>, Miss> {
        if let Some((i, bytes)) = self.given.take() {
            self.keep(i, bytes);
        }
        if let Some(file) = &mut self.file {
            let piece = file.next()?;
            let n = piece.as_ref().map_or(0, Uint8Array::length);
            self.shared.cached.set(self.shared.cached.get() + u64::from(n));
            self.shared.told_bytes();
            return Ok(piece);
        }
        loop {
            if self.stream.is_some() {
                self.keep_up(UNKEPT).await;
                if let Some(piece) = self.next_of_stream().await? {
                    return Ok(Some(piece));
                }
                continue;
            }
            self.issue();
            let Some(task) = self.tasks.pop_front() else { return Ok(None) };
            // Chunks that wait to be kept take memory: no more than a few do.
            self.keep_up(UNKEPT).await;
            match task.end().await {
                Ok((bytes, new)) => {
                    self.given = new.then(|| (task.i, bytes.clone()));
                    self.issue();
                    return Ok(Some(bytes));
                }
                Err(Miss::NoRanges) => {
                    self.tasks.clear();
                    self.issued = usize::MAX;
                    let body = self.shared.remote.whole().await?;
                    let mut stream = Stream::new(body, None);
                    stream.skip = task.i as u64 * CHUNK;
                    self.stream = Some(stream);
                }
                Err(miss) => return Err(miss),
            }
        }
    }

    /// The next bytes of the body; `None` when it is at its end, and the stream then gone.
    async fn next_of_stream(&mut self) -> Result<Option<Uint8Array>, Miss> {
        let shared = self.shared.clone();
        let remote = &shared.remote;
        let Some(stream) = &mut self.stream else { return Ok(None) };
        let piece = match stream.body.next().await {
            Ok(piece) => piece,
            Err(error @ Error::Aborted(_)) => return Err(error.into()),
            Err(error) => {
                self.resume(error).await?;
                return Ok(None);
            }
        };
        let Some(mut piece) = piece else {
            let end = stream.end.or(stream.body.total);
            if let Some(end) = end.filter(|end| stream.at < *end) {
                let error = Error::network(format!(
                    "{}: the body ended after {} of {end} bytes",
                    remote.url, stream.at
                ));
                self.resume(error).await?;
                return Ok(None);
            }
            // Where the length was not told, the end is here.
            let at_end =
                (stream.end.is_none() && stream.body.total.is_none() && stream.at > 0).then_some(stream.at);
            let rest = at_end.and_then(|end| stream.chunk_to(end));
            let at = stream.at;
            let ranged = stream.end.is_some();
            self.stream = None;
            if !ranged {
                // The file is at its end, wherever its length was not told.
                self.issued = usize::MAX;
                if remote.told().bytes.is_none() {
                    remote.expect(Told { bytes: Some(at), ..remote.told() });
                }
            }
            if let Some((i, bytes)) = rest {
                self.keep_or_hold(i, bytes);
            }
            return Ok(None);
        };
        let n = u64::from(piece.length());
        if stream.end.is_some_and(|end| stream.at + n > end) {
            stream.body.cancel();
            return Err(Error::network(format!("{} sent more than was asked for", remote.url)).into());
        }
        remote.count(n, stream.at + n > stream.skip);
        self.shared.told_bytes();
        let Some(stream) = &mut self.stream else { return Ok(None) };
        if stream.at + n <= stream.skip {
            stream.at += n;
            return Ok(None);
        }
        if stream.at < stream.skip {
            let rest = piece.slice((stream.skip - stream.at) as u32, piece.length());
            stream.at = stream.skip;
            piece = rest;
        }
        let whole = stream.gather(&piece, remote.told().bytes);
        for (i, bytes) in whole {
            self.keep_or_hold(i, bytes);
        }
        Ok(Some(piece))
    }

    /// The body broke: asks for the rest of it.
    async fn resume(&mut self, error: Error) -> Result<(), Miss> {
        let remote = &self.shared.remote;
        let Some(stream) = &mut self.stream else { return Err(error.into()) };
        stream.body.cancel();
        remote.failed(error).await?;
        match stream.end {
            Some(end) => {
                let rest = remote.range(stream.at..end).await?;
                stream.body = Body::of_bytes(rest);
            }
            None => {
                let at = stream.at;
                stream.body = remote.whole().await?;
                (stream.skip, stream.at) = (at.max(stream.skip), 0);
            }
        }
        Ok(())
    }

    /// Starts tasks until as many are under way as may be.
    fn issue(&mut self) {
        let Some(bytes) = self.shared.remote.told().bytes else { return };
        let whole_body = self.stream.as_ref().is_some_and(|stream| stream.end.is_none());
        while !whole_body && self.issued < chunk_count(bytes) && self.tasks.len() < CHUNKS_AT_ONCE {
            self.tasks.push_back(Task::start(self.shared.clone(), self.issued, bytes));
            self.issued += 1;
        }
    }

    /// Keeps a chunk of the stream, or holds it until the file is known to be sound; one that takes longer is not worth keeping.
    fn keep_or_hold(&mut self, i: usize, bytes: Uint8Array) {
        if self.shared.row.borrow().is_some() {
            self.keep(i, bytes);
        } else if self.shared.store.is_some() && i < HELD {
            self.held.push((i, bytes));
        }
    }

    fn keep(&mut self, i: usize, bytes: Uint8Array) {
        let shared = self.shared.clone();
        self.keeps.push_back(future_to_promise(async move {
            shared.keep(i, &bytes).await;
            Ok(JsValue::UNDEFINED)
        }));
    }

    /// Waits until no more than `most` chunks of the stream are being kept.
    async fn keep_up(&mut self, most: usize) {
        while self.keeps.len() > most {
            if let Some(kept) = self.keeps.pop_front() {
                // It is never rejected.
                let _ = JsFuture::from(kept).await;
            }
        }
    }

    /// Waits until everything is kept that will be. Says whether the whole file is.
    pub async fn finish(&mut self, sha256: Option<String>, now: f64) -> bool {
        self.settle_tasks().await;
        self.shared.settle(sha256, now).await
    }

    /// Gives the file up: what was kept stays for the next try.
    pub fn cancel(&mut self) {
        self.shared.remote.end();
        if let Some(stream) = self.stream.take() {
            stream.body.cancel();
        }
    }

    /// Looks for chunks that are not what they were when they were kept, and strikes them out. Says how many.
    pub async fn mend(&mut self) -> usize {
        self.cancel();
        self.file = None;
        self.settle_tasks().await;
        let (Some(store), Some(mut row)) = (self.shared.store.clone(), self.row()) else { return 0 };
        let mut bad = 0;
        for i in 0..row.chunks.len() {
            let Some(hash) = &row.chunks[i] else { continue };
            let there = self.shared.stored(&store, &row, i).await.ok().flatten();
            let sound = match &there {
                Some(bytes) => sha256(bytes).await == *hash,
                None => false,
            };
            if !sound {
                row.chunks[i] = None;
                bad += 1;
            }
        }
        if bad > 0 {
            row.repairs += 1;
            *self.shared.row.borrow_mut() = Some(row);
            self.shared.write_row().await;
        }
        bad
    }

    /// Forgets what is kept of the file.
    pub async fn forget(&mut self) {
        self.cancel();
        self.file = None;
        self.settle_tasks().await;
        self.shared.forget().await;
    }

    async fn settle_tasks(&mut self) {
        if let Some((i, bytes)) = self.given.take() {
            self.keep(i, bytes);
        }
        for task in std::mem::take(&mut self.tasks) {
            if let Ok((bytes, true)) = task.end().await {
                self.keep(task.i, bytes);
            }
        }
        self.keep_up(0).await;
    }
}
