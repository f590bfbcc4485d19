//! Matrices that are written block by block: what is there can be read, and what was refused is not there.

use super::{columns, pack, Random};
use qandle::error::Error;
use qandle::kernels::{DType, Unfilled};

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn a_matrix_can_be_written_in_blocks_of_any_order() {
    let mut random = Random(4);
    for dtype in DType::ALL {
        let (rows, cols) = (11, columns(dtype)[1]);
        let whole = pack(dtype, rows, cols, &random.blocks(dtype, rows, cols));
        let row = |w: &dyn Fn(usize, &mut [f32]), i: usize| {
            let mut values = vec![0.0; cols];
            w(i, &mut values);
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        for block in [48, 1000, 1 << 20] {
            let mut unfilled = Unfilled::new(dtype, rows, cols, block).unwrap();
            let mut order: Vec<usize> = (0..unfilled.blocks()).collect();
            (1..order.len()).rev().for_each(|i| order.swap(i, random.below(i + 1)));
            for place in order {
                assert!(unfilled.take().is_none() && !unfilled.has(place));
                let refused = unfilled.fill(place, |_, _| Err(Error::integrity("damaged")));
                assert!(refused.is_err() && !unfilled.has(place));
                let copy = unfilled.fill(place, |at, room| {
                    room.iter_mut().zip(&whole.data()[at..]).for_each(|(to, from)| {
                        to.write(*from);
                    });
                    // SAFETY: all of it was just written.
                    Ok(unsafe { &*(std::ptr::from_ref(room) as *const [u8]) })
                });
                copy.unwrap();
                for i in (0..rows).filter(|i| unfilled.blocks_of(*i).all(|place| unfilled.has(place))) {
                    let same = row(&|i, out| unfilled.dequantize_row(i, out), i)
                        == row(&|i, out| whole.dequantize_row(i, out), i);
                    assert!(same, "{} by {block}, row {i}", dtype.name());
                }
            }
            assert!(unfilled.take().unwrap().data() == whole.data(), "{} by {block}", dtype.name());
        }
    }
}
