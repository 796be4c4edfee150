//! The memory layouts of group scales that matrix units require.

/// Memory layout of scales `[rows, cols]`. The last tile is padded with zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScaleLayout {
    /// Row after row.
    RowMajor,
    /// Tiles of 128 rows by 4 scales, rows r, r + 32, r + 64, r + 96 side by side (Blackwell's block-scaled products).
    Tiles128x4,
    /// Tiles of 64 rows by 4 scales, rows r, r + 16, r + 32, r + 48 side by side (consumer Blackwell).
    Tiles64x4,
}

impl ScaleLayout {
    /// Rows per tile, and rows in one column of a tile.
    fn tile(self) -> (usize, usize) {
        match self {
            ScaleLayout::RowMajor => (1, 1),
            ScaleLayout::Tiles128x4 => (128, 32),
            ScaleLayout::Tiles64x4 => (64, 16),
        }
    }

    /// Size of `rows` by `cols` scales in bytes.
    pub fn size_bytes(self, rows: usize, cols: usize) -> usize {
        match self {
            ScaleLayout::RowMajor => rows * cols,
            _ => rows.next_multiple_of(self.tile().0) * cols.next_multiple_of(4),
        }
    }

    /// Offset of a scale in bytes.
    pub fn offset(self, cols: usize, row: usize, col: usize) -> usize {
        if self == ScaleLayout::RowMajor {
            return row * cols + col;
        }
        let (rows, column) = self.tile();
        // Tiles advance along a row first.
        let tile = row / rows * cols.div_ceil(4) + col / 4;
        tile * rows * 4 + row % column * 16 + row % rows / column * 4 + col % 4
    }

    /// Converts row-major scales to this layout. Panics if there are not `rows * cols`.
    ///
    /// ```
    /// use fulgurite_core::format::ScaleLayout;
    /// let scales: Vec<u8> = (0..40).collect();
    /// let packed = ScaleLayout::Tiles128x4.pack(&scales, 8, 5);
    /// assert_eq!((packed.len(), packed[16]), (1024, 5)); // the second row begins at 16
    /// assert_eq!(ScaleLayout::Tiles128x4.unpack(&packed, 8, 5), scales);
    /// ```
    pub fn pack(self, scales: &[u8], rows: usize, cols: usize) -> Vec<u8> {
        assert_eq!(scales.len(), rows * cols, "scales");
        let mut out = vec![0; self.size_bytes(rows, cols)];
        for (i, &scale) in scales.iter().enumerate() {
            out[self.offset(cols, i / cols, i % cols)] = scale;
        }
        out
    }

    /// Converts scales of this layout to row-major. Panics if there are fewer than [`size_bytes`](Self::size_bytes).
    pub fn unpack(self, packed: &[u8], rows: usize, cols: usize) -> Vec<u8> {
        assert!(packed.len() >= self.size_bytes(rows, cols), "packed scales");
        (0..rows * cols).map(|i| packed[self.offset(cols, i / cols, i % cols)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::ScaleLayout;

    #[test]
    fn layouts_are_permutations_with_known_places() {
        for layout in [ScaleLayout::RowMajor, ScaleLayout::Tiles128x4, ScaleLayout::Tiles64x4] {
            for (rows, cols) in [(1, 1), (128, 4), (130, 9), (64, 8), (300, 3)] {
                let scales: Vec<u8> = (0..rows * cols).map(|i| (i * 7 % 255 + 1) as u8).collect();
                let packed = layout.pack(&scales, rows, cols);
                assert_eq!(layout.unpack(&packed, rows, cols), scales, "{layout:?} {rows}x{cols}");
                assert_eq!(packed.iter().filter(|&&x| x != 0).count(), rows * cols, "{layout:?}: no place twice");
            }
        }
        // (r % 32) * 16 + (r / 32) * 4 + c, tiles of 512 bytes along the row first.
        assert_eq!(ScaleLayout::Tiles128x4.offset(8, 33, 2), 16 + 4 + 2);
        assert_eq!(ScaleLayout::Tiles128x4.offset(8, 33, 6), 512 + 16 + 4 + 2);
        assert_eq!(ScaleLayout::Tiles128x4.offset(8, 128, 0), 1024);
        assert_eq!(ScaleLayout::Tiles64x4.offset(8, 17, 5), 256 + 16 + 4 + 1);
    }
}
