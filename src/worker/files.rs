//! A model in several files: shards of a GGUF, or safetensors with what stands beside them. All headers are read first, so
//! that what is missing or does not fit is told before a weight is fetched; then one file after the other.

use super::beginning::Beginning;
use super::load::{at, Job, Loaded};
use super::reading::{Reading, TAIL};
use crate::config;
use crate::engine::{now_ms, TextSide};
use crate::error::{Error, Result};
use crate::gguf::{self, Split};
use crate::safetensors;
use crate::store::browser::each_piece;
use crate::store::reader::{Reader, AT_ONCE};
use crate::store::remote::Miss;
use crate::store::source::{Body, Source};
use crate::store::Store;
use crate::tokenizer::TextFiles;
use crate::weights::{Loader, Quantize};
use js_sys::{Array, Reflect};
use wasm_bindgen::{JsCast, JsValue};
use web_sys::AbortController;

/// Bytes of a file that is read whole: the largest `tokenizer.json` have some 35 MB.
const MAX_SMALL: usize = 64 << 20;

/// The files that a model is in.
pub(super) enum Files {
    /// One GGUF file.
    One(Source),
    /// The shards of one, in any order.
    Shards(Vec<Source>),
    /// Safetensors and the files beside them.
    Safetensors(Box<Repository>),
}

/// The files of a Hugging Face repository.
pub(super) struct Repository {
    weights: Vec<Source>,
    config: Source,
    tokenizer: Source,
    /// These may be missing where they are URLs.
    tokenizer_config: Option<Source>,
    generation_config: Option<Source>,
    chat_template: Option<Source>,
    quantize: Quantize,
}

/// Bytes of the files that tokenizer, template and hyper-parameters are made of.
struct Small {
    config: Vec<u8>,
    tokenizer: Vec<u8>,
    tokenizer_config: Option<Vec<u8>>,
    generation_config: Option<Vec<u8>>,
    chat_template: Option<Vec<u8>>,
}

impl Files {
    /// Reads `{ url | blob }`, `{ files: [{ url | blob }] }`, or `{ files, config, tokenizer, … }`.
    pub(super) fn from_js(value: &JsValue) -> Result<Self> {
        let member = |key: &str| Reflect::get(value, &key.into()).ok().filter(|v| v.is_object());
        let optional = |key: &str| member(key).map(|v| Source::from_js(&v)).transpose();
        let Some(list) = member("files").and_then(|list| list.dyn_into::<Array>().ok()) else {
            return Ok(Files::One(Source::from_js(value)?));
        };
        let files = list.iter().map(|file| Source::from_js(&file)).collect::<Result<Vec<_>>>()?;
        let Some(config) = optional("config")? else { return Ok(Files::Shards(files)) };
        let tokenizer = optional("tokenizer")?
            .ok_or_else(|| Error::invalid_request("safetensors need a tokenizer.json"))?;
        let quantize =
            match Reflect::get(value, &"quantize".into()).ok().and_then(|q| q.as_string()).as_deref() {
                None | Some("none") => Quantize::None,
                Some("q8_0") => Quantize::Q8_0,
                Some("q4_0") => Quantize::Q4_0,
                Some(other) => {
                    return Err(Error::invalid_request(format!(
                        "quantize must be none, q8_0 or q4_0, found {other:?}"
                    )))
                }
            };
        Ok(Files::Safetensors(Box::new(Repository {
            weights: files,
            config,
            tokenizer,
            tokenizer_config: optional("tokenizerConfig")?,
            generation_config: optional("generationConfig")?,
            chat_template: optional("chatTemplate")?,
            quantize,
        })))
    }

    /// `network` or `file`, as progress reports it.
    pub(super) fn kind(&self) -> &'static str {
        self.first().map_or("file", Source::kind)
    }

    /// The first file's name without its ending.
    pub(super) fn stem(&self) -> String {
        self.first().map(Source::stem).unwrap_or_default()
    }

    fn first(&self) -> Option<&Source> {
        match self {
            Files::One(file) => Some(file),
            Files::Shards(files) => files.first(),
            Files::Safetensors(repository) => repository.weights.first(),
        }
    }

    /// A loader that knows all headers, with the files in the order in which it takes them. Of safetensors the text side too.
    pub(super) async fn plan(
        &self,
        store: Option<&Store>,
        abort: &AbortController,
    ) -> Result<(Loader, Vec<Source>, Option<TextSide>)> {
        match self {
            Files::One(_) => Err(Error::invalid_request("one file is read at once")),
            Files::Shards(files) => {
                let mut headers = Vec::new();
                for file in files {
                    let mut reader = gguf::HeaderReader::new(None);
                    headers.push(header(file, abort, |piece| reader.push(piece)).await?);
                }
                let splits: Vec<_> =
                    headers.iter().map(|header| Split::of(&header.metadata)).collect::<Result<_>>()?;
                let order = gguf::shard_order(&splits)?;
                let mut left: Vec<_> = headers.into_iter().map(Some).collect();
                let headers = order.iter().filter_map(|i| left[*i].take()).collect();
                Ok((Loader::from_headers(headers)?, order.iter().map(|i| files[*i].clone()).collect(), None))
            }
            Files::Safetensors(repository) => {
                let small = repository.small(store, abort).await?;
                let mut headers = Vec::new();
                for file in &repository.weights {
                    let mut reader = safetensors::HeaderReader::new(None);
                    headers.push(header(file, abort, |piece| reader.push(piece)).await?);
                }
                let made = config::from_json(&small.config).and_then(|config| {
                    let loader = Loader::from_safetensors(config, headers, repository.quantize)?;
                    let text =
                        loader.plan().map(|plan| TextSide::from_files(&small.files(), plan)).transpose()?;
                    Ok((loader, text))
                });
                if made.as_ref().is_err_and(Error::is_of_bytes) {
                    repository.forget(store).await;
                }
                let (loader, text) = made?;
                Ok((loader, repository.weights.clone(), text))
            }
        }
    }
}

impl Repository {
    /// Forgets the small files, of which no model can be made: the next try asks for them again.
    async fn forget(&self, store: Option<&Store>) {
        let Some(store) = store else { return };
        let optional = [&self.tokenizer_config, &self.generation_config, &self.chat_template];
        let files = [&self.config, &self.tokenizer].into_iter().chain(optional.into_iter().flatten());
        for file in files {
            if let Source::Url(place) = file {
                if let Ok(Some(row)) = store.manifest(&place.key).await {
                    // What cannot be deleted now is asked about again the next time.
                    let _ = store.delete(&row).await;
                }
            }
        }
    }

    async fn small(&self, store: Option<&Store>, abort: &AbortController) -> Result<Small> {
        let optional = |file: &Option<Source>| {
            let file = file.clone();
            async move {
                let Some(file) = file else { return Ok(None) };
                match whole(&file, store, abort).await {
                    Ok(bytes) => Ok(Some(bytes)),
                    // Few repositories have all of them, and some servers send a page instead.
                    Err(Error::HttpStatus(_) | Error::NotAModel(_)) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        };
        Ok(Small {
            config: whole(&self.config, store, abort).await?,
            tokenizer: whole(&self.tokenizer, store, abort).await?,
            tokenizer_config: optional(&self.tokenizer_config).await?,
            generation_config: optional(&self.generation_config).await?,
            chat_template: optional(&self.chat_template).await?,
        })
    }
}

impl Small {
    fn files(&self) -> TextFiles<'_> {
        TextFiles {
            tokenizer: &self.tokenizer,
            config: &self.config,
            tokenizer_config: self.tokenizer_config.as_deref(),
            generation_config: self.generation_config.as_deref(),
            chat_template: self.chat_template.as_deref(),
        }
    }
}

/// The header of a file; what follows it is given up unread.
async fn header<H>(
    file: &Source,
    abort: &AbortController,
    mut push: impl FnMut(&[u8]) -> Result<Option<H>>,
) -> Result<H> {
    let name = file.name();
    let (mut beginning, _) = Beginning::open(file, abort).await.map_err(|e| at(&name, e))?;
    let mut result = Ok(None);
    while let Ok(None) = result {
        let Some(chunk) = beginning.next().await.map_err(|e| at(&name, e))? else { break };
        each_piece(&chunk, |piece| {
            if let Ok(None) = result {
                result = push(piece);
            }
        });
    }
    result
        .map_err(|e| at(&name, e))?
        .ok_or_else(|| at(&name, Error::bad_model("the file ends in its header")))
}

/// A small file, kept as the weights are.
async fn whole(file: &Source, store: Option<&Store>, abort: &AbortController) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut take = |chunk: &js_sys::Uint8Array| {
        if bytes.len() + chunk.length() as usize > MAX_SMALL {
            let message = format!("{} has more than {MAX_SMALL} bytes", file.name());
            return Err(Error::bad_model(message));
        }
        bytes.extend(chunk.to_vec());
        Ok(())
    };
    match file {
        Source::Blob(blob) => {
            let mut body = Body::of_blob(blob)?;
            while let Some(chunk) = body.next().await? {
                take(&chunk)?;
            }
        }
        Source::Url(place) => {
            let mut reader =
                Reader::open(place, store.cloned(), AT_ONCE, abort, super::load::silent()).await?;
            let read = async {
                while let Some(chunk) = reader.next().await? {
                    take(&chunk)?;
                }
                Ok::<_, Miss>(())
            };
            if let Err(miss) = read.await {
                reader.forget().await;
                return Err(at(&place.url, miss.into()));
            }
            if looks_like_a_page(&bytes) {
                reader.forget().await;
                let message = format!("{} sends a page where a file was asked for", place.url);
                return Err(Error::not_a_model(message));
            }
            let end = bytes.len() as u64;
            reader.planned(end, 0, &file.stem()).await;
            reader.finish(None, now_ms()).await;
        }
    }
    Ok(bytes)
}

/// Whether these are a web page's bytes: a portal's sign-in, or an application that answers everything with itself.
fn looks_like_a_page(bytes: &[u8]) -> bool {
    let start = bytes.trim_ascii_start();
    let begins = |tag: &str| start.get(..tag.len()).is_some_and(|b| b.eq_ignore_ascii_case(tag.as_bytes()));
    begins("<!doctype") || begins("<html")
}

impl Job<'_> {
    /// Reads a model in several files. One that changed on its server, or in the store, is read again.
    pub(super) async fn read_files(&self, files: &Files, cache: Option<&str>) -> Result<Loaded> {
        if self.wanted.is_some() {
            return Err(Error::invalid_request("a sha256 is that of one file, but there are several"));
        }
        let store = self.open_store(cache).await;
        match self.try_files(files, store.as_ref()).await {
            Err(Miss::Changed) => self.try_files(files, store.as_ref()).await.map_err(Error::from),
            other => other.map_err(Error::from),
        }
    }

    async fn try_files(&self, files: &Files, store: Option<&Store>) -> std::result::Result<Loaded, Miss> {
        self.report.send("plan", 0, None, 0.0);
        let (mut loader, order, text) = files.plan(store, self.abort).await?;
        let plan = loader.plan().cloned().ok_or_else(|| Error::bad_model("there is no plan"))?;
        self.check_plan(&plan)?;
        self.report.set_total(plan.end);
        let text = match (text, loader.metadata()) {
            (Some(text), _) => text,
            (None, Some(metadata)) => TextSide::from_gguf(metadata, &plan)?,
            (None, None) => return Err(Error::bad_model("the files have no metadata").into()),
        };
        self.warm_kernels(&plan).await;
        let mut reading = Reading::of_files(self, loader, text);
        let mut before = 0;
        for (file, end) in order.iter().zip(&plan.file_ends) {
            self.report.set_before(before);
            before += end;
            self.read_file(file, *end, store, &mut reading).await?;
            reading.loader.next_file()?;
        }
        Ok(reading.end(None)?)
    }

    /// Reads one of the files.
    async fn read_file(
        &self,
        file: &Source,
        end: u64,
        store: Option<&Store>,
        reading: &mut Reading<'_>,
    ) -> std::result::Result<(), Miss> {
        let place = match file {
            Source::Url(place) => place,
            Source::Blob(blob) => {
                self.report.set_source("file");
                let (mut body, mut read) = (Body::of_blob(blob)?, 0);
                while let Some(chunk) = body.next().await? {
                    read += u64::from(chunk.length());
                    self.report.bytes(read);
                    reading.take(&chunk).await?;
                }
                return Ok(());
            }
        };
        let mut reader = Reader::open(place, store.cloned(), AT_ONCE, self.abort, self.hooks())
            .await
            .map_err(|e| at(&place.url, e))?;
        self.report.set_source(if reader.is_cached() { "cache" } else { "network" });
        reader.planned(end, 0, &file.stem()).await;
        let mut read = 0;
        let reading = async {
            while let Some(chunk) = reader.next().await? {
                read += u64::from(chunk.length());
                reading.take(&chunk).await?;
                if read > end + TAIL {
                    break;
                }
            }
            Ok::<_, Miss>(())
        };
        let Err(miss) = reading.await else {
            reader.finish(None, now_ms()).await;
            return Ok(());
        };
        let of_bytes = matches!(&miss, Miss::Failed(error) if error.is_of_bytes());
        let changed = matches!(miss, Miss::Changed);
        if changed || (of_bytes && reader.mend().await == 0) {
            reader.forget().await;
        } else if !of_bytes {
            reader.cancel();
            reader.finish(None, now_ms()).await;
        }
        Err(match miss {
            Miss::Failed(error) => at(&place.url, error).into(),
            other => other,
        })
    }
}
