//! Four f32 lanes and the few functions the kernels need on them, as one scalar reference and one `simd128` twin.
//! Every operation is a single IEEE one (no fused multiply-add), so code written on [`F32x4`] gives the same bits
//! natively, on `simd128` and on `relaxed-simd`.

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub use simd::F32x4;

#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
pub use scalar::F32x4;

/// The largest finite f16; keys and values beyond it are held at it.
const F16_MAX: f32 = 65504.0;

// The twin that is not built still has to stay compilable, so both keep the same list of functions.
// Plain methods: chains of them read in the order in which they run.
#[allow(dead_code, clippy::should_implement_trait)]
mod scalar {
    /// Four f32 lanes (scalar reference).
    #[derive(Clone, Copy, Debug)]
    pub struct F32x4([f32; 4]);

    impl F32x4 {
        /// All four lanes `x`.
        #[inline(always)]
        pub fn splat(x: f32) -> Self {
            Self([x; 4])
        }
        /// The first four of `xs`.
        #[inline(always)]
        pub fn load(xs: &[f32]) -> Self {
            Self([xs[0], xs[1], xs[2], xs[3]])
        }
        /// Widens the first four f16 bit patterns of `xs`, exactly.
        #[inline(always)]
        pub fn load_f16(xs: &[u16]) -> Self {
            Self([0, 1, 2, 3].map(|i| half::f16::from_bits(xs[i]).to_f32()))
        }
        /// The four as floats, exactly.
        #[inline(always)]
        pub fn from_i8(q: [i8; 4]) -> Self {
            Self(q.map(f32::from))
        }
        /// Writes the lanes to the first four of `out`.
        #[inline(always)]
        pub fn store(self, out: &mut [f32]) {
            out[..4].copy_from_slice(&self.0);
        }
        /// [`F32x4::load`] from a pointer.
        ///
        /// # Safety
        /// `xs` must be readable for four elements.
        #[inline(always)]
        pub unsafe fn read(xs: *const f32) -> Self {
            // SAFETY: as the caller promises.
            Self(unsafe { xs.cast::<[f32; 4]>().read_unaligned() })
        }
        /// [`F32x4::store`] to a pointer.
        ///
        /// # Safety
        /// `out` must be writable for four elements.
        #[inline(always)]
        pub unsafe fn write(self, out: *mut f32) {
            // SAFETY: as the caller promises.
            unsafe { out.cast::<[f32; 4]>().write_unaligned(self.0) }
        }
        /// Widens the first four f16 bit patterns of `xs`, all of them finite, exactly.
        #[inline(always)]
        pub fn load_finite_f16(xs: &[u16]) -> Self {
            Self::load_f16(xs)
        }
        /// The nearest f16 (ties to even) in the low half of each lane's bits; beyond ±65504 it is that. Not for NaN.
        #[inline(always)]
        pub fn to_f16(self) -> [u16; 4] {
            self.0.map(super::to_f16_bits)
        }
        /// Whether no lane is infinite or NaN.
        #[inline(always)]
        pub fn is_finite(self) -> bool {
            self.0.iter().all(|x| x.is_finite())
        }
        /// The lanes as an array.
        #[inline(always)]
        pub fn to_array(self) -> [f32; 4] {
            self.0
        }
        #[inline(always)]
        fn zip(self, o: Self, f: impl Fn(f32, f32) -> f32) -> Self {
            Self([0, 1, 2, 3].map(|i| f(self.0[i], o.0[i])))
        }
        /// Lane-wise sum.
        #[inline(always)]
        pub fn add(self, o: Self) -> Self {
            self.zip(o, |a, b| a + b)
        }
        /// Lane-wise difference.
        #[inline(always)]
        pub fn sub(self, o: Self) -> Self {
            self.zip(o, |a, b| a - b)
        }
        /// Lane-wise product.
        #[inline(always)]
        pub fn mul(self, o: Self) -> Self {
            self.zip(o, |a, b| a * b)
        }
        /// Lane-wise quotient.
        #[inline(always)]
        pub fn div(self, o: Self) -> Self {
            self.zip(o, |a, b| a / b)
        }
        /// The larger in each lane; where one is NaN, either of the two.
        #[inline(always)]
        pub fn max(self, o: Self) -> Self {
            self.zip(o, |a, b| if a < b { b } else { a })
        }
        /// The smaller in each lane; where one is NaN, either of the two.
        #[inline(always)]
        pub fn min(self, o: Self) -> Self {
            self.zip(o, |a, b| if b < a { b } else { a })
        }
        /// `x` in the lanes where it is NaN, `self` in the others.
        #[inline(always)]
        pub fn or_nan_of(self, x: Self) -> Self {
            self.zip(x, |a, x| if x.is_nan() { x } else { a })
        }
        /// `2^n` for lanes that hold [`ROUND`](super::ROUND)` + n`, n in −126..=127 (NaN gives anything).
        #[inline(always)]
        pub fn exp2_of_rounded(self) -> Self {
            Self(self.0.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(127 << 23))))
        }
    }
}

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
#[allow(clippy::should_implement_trait)]
mod simd {
    use core::arch::wasm32::*;

    /// Four f32 lanes (`simd128`).
    #[derive(Clone, Copy, Debug)]
    pub struct F32x4(v128);

    impl F32x4 {
        /// All four lanes `x`.
        #[inline(always)]
        pub fn splat(x: f32) -> Self {
            Self(f32x4_splat(x))
        }
        /// The first four of `xs`.
        #[inline(always)]
        pub fn load(xs: &[f32]) -> Self {
            let xs = &xs[..4];
            // SAFETY: the slice above holds the 16 bytes that are read; v128 loads need no alignment.
            Self(unsafe { v128_load(xs.as_ptr() as *const v128) })
        }
        /// Widens the first four f16 bit patterns of `xs`, exactly.
        #[inline(always)]
        pub fn load_f16(xs: &[u16]) -> Self {
            let xs = &xs[..4];
            // SAFETY: the slice above holds the 8 bytes that are read; the load needs no alignment.
            let bits = unsafe { v128_load64_zero(xs.as_ptr() as *const u64) };
            let wide = u32x4_extend_low_u16x8(bits);
            let sign = i32x4_shl(v128_and(wide, u32x4_splat(0x8000)), 16);
            let magnitude = i32x4_shl(v128_and(wide, u32x4_splat(0x7fff)), 13);
            // 2^112 moves the exponent's bias from 15 to 127 and makes subnormals normal.
            let value = f32x4_mul(magnitude, u32x4_splat(0x7780_0000));
            let special = i32x4_ge(magnitude, u32x4_splat(0x0f80_0000));
            let value = v128_or(value, v128_and(special, u32x4_splat(0x7f80_0000)));
            Self(v128_or(value, sign))
        }
        /// The four as floats, exactly.
        #[inline(always)]
        pub fn from_i8(q: [i8; 4]) -> Self {
            // SAFETY: four bytes are read from an array of four.
            let q = unsafe { v128_load32_zero(q.as_ptr().cast()) };
            Self(f32x4_convert_i32x4(i32x4_extend_low_i16x8(i16x8_extend_low_i8x16(q))))
        }
        /// Writes the lanes to the first four of `out`.
        #[inline(always)]
        pub fn store(self, out: &mut [f32]) {
            let out = &mut out[..4];
            // SAFETY: the slice above holds the 16 bytes that are written; v128 stores need no alignment.
            unsafe { v128_store(out.as_mut_ptr() as *mut v128, self.0) }
        }
        /// [`F32x4::load`] from a pointer.
        ///
        /// # Safety
        /// `xs` must be readable for four elements.
        #[inline(always)]
        pub unsafe fn read(xs: *const f32) -> Self {
            // SAFETY: as the caller promises.
            Self(unsafe { v128_load(xs.cast()) })
        }
        /// [`F32x4::store`] to a pointer.
        ///
        /// # Safety
        /// `out` must be writable for four elements.
        #[inline(always)]
        pub unsafe fn write(self, out: *mut f32) {
            // SAFETY: as the caller promises.
            unsafe { v128_store(out.cast(), self.0) }
        }
        /// Widens the first four f16 bit patterns of `xs`, all of them finite, exactly.
        #[inline(always)]
        pub fn load_finite_f16(xs: &[u16]) -> Self {
            let xs = &xs[..4];
            // SAFETY: the slice above holds the 8 bytes that are read; the load needs no alignment.
            let wide = i32x4_shl(unsafe { i32x4_load_extend_i16x4(xs.as_ptr().cast()) }, 13);
            // 2^112 moves the exponent's bias from 15 to 127 and makes subnormals normal.
            Self(f32x4_mul(v128_and(wide, u32x4_splat(0x8fff_e000)), u32x4_splat(0x7780_0000)))
        }
        /// The nearest f16 (ties to even) in the low half of each lane's bits; beyond ±65504 it is that. Not for NaN.
        #[inline(always)]
        pub fn to_f16(self) -> [u16; 4] {
            let sign = v128_and(u32x4_shr(self.0, 16), u32x4_splat(0x8000));
            let size = f32x4_pmin(v128_and(self.0, u32x4_splat(0x7fff_ffff)), f32x4_splat(super::F16_MAX));
            // The bias goes from 127 to 15; half a unit less one, and one more where the last kept bit is odd, rounds.
            let odd = v128_and(u32x4_shr(size, 13), u32x4_splat(1));
            let normal = u32x4_shr(i32x4_add(i32x4_add(size, odd), u32x4_splat(0xc800_0fff)), 13);
            // Beside 0.5 the last bit of a float is worth 2^-24, the unit of subnormal halves.
            let half = f32x4_splat(0.5);
            let subnormal = i32x4_sub(f32x4_add(size, half), half);
            let bits = v128_bitselect(subnormal, normal, i32x4_lt(size, u32x4_splat(0x3880_0000)));
            let bits = v128_or(bits, sign);
            [
                i32x4_extract_lane::<0>(bits) as u16,
                i32x4_extract_lane::<1>(bits) as u16,
                i32x4_extract_lane::<2>(bits) as u16,
                i32x4_extract_lane::<3>(bits) as u16,
            ]
        }
        /// Whether no lane is infinite or NaN.
        #[inline(always)]
        pub fn is_finite(self) -> bool {
            let size = v128_and(self.0, u32x4_splat(0x7fff_ffff));
            i32x4_all_true(i32x4_lt(size, u32x4_splat(0x7f80_0000)))
        }
        /// The lanes as an array.
        #[inline(always)]
        pub fn to_array(self) -> [f32; 4] {
            [
                f32x4_extract_lane::<0>(self.0),
                f32x4_extract_lane::<1>(self.0),
                f32x4_extract_lane::<2>(self.0),
                f32x4_extract_lane::<3>(self.0),
            ]
        }
        /// Lane-wise sum.
        #[inline(always)]
        pub fn add(self, o: Self) -> Self {
            Self(f32x4_add(self.0, o.0))
        }
        /// Lane-wise difference.
        #[inline(always)]
        pub fn sub(self, o: Self) -> Self {
            Self(f32x4_sub(self.0, o.0))
        }
        /// Lane-wise product.
        #[inline(always)]
        pub fn mul(self, o: Self) -> Self {
            Self(f32x4_mul(self.0, o.0))
        }
        /// Lane-wise quotient.
        #[inline(always)]
        pub fn div(self, o: Self) -> Self {
            Self(f32x4_div(self.0, o.0))
        }
        /// The larger in each lane; where one is NaN, either of the two.
        #[inline(always)]
        pub fn max(self, o: Self) -> Self {
            Self(f32x4_pmax(self.0, o.0))
        }
        /// The smaller in each lane; where one is NaN, either of the two.
        #[inline(always)]
        pub fn min(self, o: Self) -> Self {
            Self(f32x4_pmin(self.0, o.0))
        }
        /// `x` in the lanes where it is NaN, `self` in the others.
        #[inline(always)]
        pub fn or_nan_of(self, x: Self) -> Self {
            Self(v128_bitselect(x.0, self.0, f32x4_ne(x.0, x.0)))
        }
        /// `2^n` for lanes that hold [`ROUND`](super::ROUND)` + n`, n in −126..=127 (NaN gives anything).
        #[inline(always)]
        pub fn exp2_of_rounded(self) -> Self {
            Self(i32x4_add(i32x4_shl(self.0, 23), i32x4_splat(127 << 23)))
        }
    }
}

/// 1.5 · 2^23: added to a number below 2^22 it leaves the nearest whole one, ties to even, in the low bits.
const ROUND: f32 = 12_582_912.0;

impl F32x4 {
    /// The lanes' sum as `(l0 + l1) + (l2 + l3)`.
    #[inline(always)]
    pub fn sum(self) -> f32 {
        let [a, b, c, d] = self.to_array();
        (a + b) + (c + d)
    }

    /// e^x in each lane, within 2 ulp for −87..88; below it gives about 1.6e-38, above 1.7e38. NaN stays NaN.
    ///
    /// Cody–Waite reduction by ln 2 in two parts, then a polynomial of degree 6 (Taylor terms; |r| ≤ ln2/2).
    #[inline(always)]
    pub fn exp(self) -> Self {
        // `pmax` and `pmin` let go of a NaN where LLVM makes the relaxed instructions of them.
        let x = self.max(Self::splat(-87.0)).min(Self::splat(88.0));
        let rounded = x.mul(Self::splat(std::f32::consts::LOG2_E)).add(Self::splat(ROUND));
        let n = rounded.sub(Self::splat(ROUND));
        let r = x.sub(n.mul(Self::splat(0.693_359_4))).sub(n.mul(Self::splat(-2.121_944_4e-4)));
        let mut p = Self::splat(1.0 / 720.0);
        for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = p.mul(r).add(Self::splat(c));
        }
        p.mul(rounded.exp2_of_rounded()).or_nan_of(self)
    }
}

/// e^x as [`F32x4::exp`] gives it.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    F32x4::splat(x).exp().to_array()[0]
}

/// The f16 nearest to `x` (ties to even) as bits; finite values beyond its range are held at ±65504.
#[inline(always)]
pub fn to_f16_bits(x: f32) -> u16 {
    let x = if x > F16_MAX && x.is_finite() { F16_MAX } else { x };
    let x = if x < -F16_MAX && x.is_finite() { -F16_MAX } else { x };
    half::f16::from_f32_const(x).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn exp_is_within_two_ulp_of_f64() {
        let mut x = -87.0f32;
        while x < 88.0 {
            let want = (x as f64).exp();
            let got = exp(x) as f64;
            assert!((got - want).abs() <= want * 2.4e-7, "exp({x}) = {got}, expected {want}");
            x += 0.0137;
        }
        // Hidden from the compiler, which would work these out by rules of its own.
        let exp = |x: f32| exp(std::hint::black_box(x));
        assert!(exp(f32::NAN).is_nan() && exp(-f32::NAN).is_nan());
        assert!(exp(f32::NEG_INFINITY) < 2e-38 && exp(-1e30) > 0.0);
        assert!(exp(f32::INFINITY) > 1.6e38);
    }

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn every_f16_widens_exactly() {
        for bits in 0..=u16::MAX {
            let want = half::f16::from_bits(bits).to_f32();
            let got = F32x4::load_f16(&[bits; 4]).to_array()[3];
            assert!(got == want || (got.is_nan() && want.is_nan()), "{bits:#06x}: {got} is not {want}");
            if !want.is_nan() && want.is_finite() {
                assert_eq!(to_f16_bits(want), bits);
            }
        }
        assert_eq!(to_f16_bits(1e9), 0x7bff);
        assert_eq!(to_f16_bits(-1e9), 0xfbff);
    }

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn halves_are_rounded_as_by_the_half_crate() {
        // Each finite half, the point between it and the next, and the floats just beside.
        for bits in 0..0x7c00u16 {
            let x = half::f16::from_bits(bits).to_f32();
            let next = if bits == 0x7bff { 65536.0 } else { half::f16::from_bits(bits + 1).to_f32() };
            let middle = x + (next - x) / 2.0;
            let around = [x, middle.next_down(), middle, middle.next_up()];
            for sign in [1.0, -1.0] {
                let around = around.map(|x| sign * x);
                let want = around.map(to_f16_bits);
                assert_eq!(F32x4::load(&around).to_f16(), want, "around {:?}", around);
            }
            let wide = F32x4::load_finite_f16(&[bits, bits | 0x8000, 0, 0x8000]).to_array();
            assert_eq!(wide.map(f32::to_bits), [x, -x, 0.0, -0.0].map(f32::to_bits));
        }
        let extremes = [1e9, -1e9, f32::MAX, f32::from_bits(1)];
        assert_eq!(F32x4::load(&extremes).to_f16(), [0x7bff, 0xfbff, 0x7bff, 0]);
        assert!(F32x4::load(&extremes).is_finite());
        for x in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!((0..4).all(|lane| {
                let mut xs = [1.0; 4];
                xs[lane] = std::hint::black_box(x);
                !F32x4::load(&xs).is_finite()
            }));
        }
    }
}
