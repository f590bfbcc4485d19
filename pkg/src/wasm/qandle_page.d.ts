// The glue of the page module is generated into dist/wasm/; this is the part of it that page.ts uses.
export default function init(options: { module_or_path: URL | string }): Promise<unknown>;
export declare function preferences(): unknown;
export declare function set_preference(key: string, value: unknown): void;
export declare function reset_preferences(): void;
export declare function set_mark(id: string, value: unknown): boolean;
export declare function marks(): { id: string; at: number; value: unknown }[];
export declare function clear_mark(id: string): void;
