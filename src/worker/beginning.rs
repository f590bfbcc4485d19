//! The beginning of a file, for its header: from where the file is kept, a file of the page, or the network.

use crate::error::{Error, Result};
use crate::store::browser::sha256;
use crate::store::manifest::Manifest;
use crate::store::reader::AT_ONCE;
use crate::store::remote::{First, Remote};
use crate::store::source::{Body, Source};
use crate::store::Store;
use js_sys::Uint8Array;
use web_sys::AbortController;

/// Where a file's beginning is read.
pub(super) enum Beginning {
    /// From a file of the page, or the network.
    Body(Body),
    /// From the store: these chunks from the one of this number on; else from the network.
    Kept(Box<(Store, Manifest, usize, Remote)>),
}

impl Beginning {
    /// Opens it; gives the file's bytes too, where they are known.
    pub(super) async fn open(source: &Source, abort: &AbortController) -> Result<(Self, Option<u64>)> {
        let place = match source {
            Source::Blob(blob) => return Ok((Self::Body(Body::of_blob(blob)?), Some(blob.size() as u64))),
            Source::Url(place) => place,
        };
        let remote = Remote::new(&place.url, AT_ONCE, &abort.signal())?;
        if let Ok(store) = Store::open(None).await {
            if let Some(row) = store.manifest(&place.key).await?.filter(Manifest::is_complete) {
                let bytes = row.bytes;
                return Ok((Self::Kept(Box::new((store, row, 0, remote))), Some(bytes)));
            }
        }
        match remote.first().await? {
            First::Range(body, _) | First::Whole(body) => Ok((Self::Body(body), remote.told().bytes)),
        }
    }

    /// The next bytes.
    pub(super) async fn next(&mut self) -> Result<Option<Uint8Array>> {
        match self {
            Self::Body(body) => body.next().await,
            Self::Kept(kept) => {
                let (store, row, i, remote) = &mut **kept;
                *i += 1;
                let Some(hash) = row.chunks.get(*i - 1) else { return Ok(None) };
                let chunk = store.chunk(row, *i - 1, None).await.ok().flatten();
                match chunk {
                    Some(chunk) if Some(sha256(&chunk).await) == *hash => Ok(Some(chunk)),
                    // Damaged or gone: it is mended when the file itself is read.
                    _ if *i == 1 => {
                        let (First::Range(mut body, _) | First::Whole(mut body)) = remote.first().await?;
                        let first = body.next().await;
                        *self = Self::Body(body);
                        first
                    }
                    _ => Err(Error::integrity("a chunk is damaged, or not kept any more")),
                }
            }
        }
    }
}
